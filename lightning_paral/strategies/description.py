"""The attributes that describe a strategy. A new strategy sets them in its class or its constructor."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.options import ActivationCheckpointing, Form, UnitChoice
from lightning_paral.planning.layout import Layout


class StrategyDescription(ParallelStrategy):
    """Mixin: all that the shared code knows about a strategy before a run."""

    strategy_name: str
    """The registered name, such as `"paral_ddp"`, with which the start line begins.

    If a strategy does not set it, the start line begins with the name of the class.
    """

    forward_has_collectives: bool = False
    """Whether a forward pass of the module is *collective*.

    If so, ranks that run out of evaluation data run padding batches until all ranks have run out.
    """

    shares_buffers: bool = True
    """Whether all ranks train and validate with rank 0's buffers, as under DDP."""

    _default_form: Form = "full"
    """The form of checkpoints if the user does not choose one.

    `"sharded"` also declares that ranks may hold shards of weights. Averaging callbacks then keep shards, weights are
    restored after `setup` if the module is sharded before it, and a user's `CheckpointIO` is rejected.
    """

    _averaging_obstacle: str | None = None
    """Why callbacks cannot average weights under this strategy, and what to do; `None` if they can."""

    _units: UnitChoice = "auto"
    """The option `units`: which submodules are sharded together."""

    _min_params: int | None = None
    """The option `min_params`. It and `units` are checked against the module before other processes are started."""

    _activation_checkpointing: ActivationCheckpointing | None = None
    """The option `activation_checkpointing`; `None`: no unit recomputes its activations."""

    @property
    def layout(self) -> Layout | None:
        """How a plan counts the strategy with its options; `None` if it cannot be planned."""
        return None

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing | None:
        """The option `activation_checkpointing`; `None`: no unit recomputes its activations."""
        return self._activation_checkpointing

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of the ranks: which ranks draw different samples, and which hold the same tensors.

        By default, every rank holds a full replica and draws different samples.
        """
        return ParallelDims(rank=self.global_rank, replicate=self.world_size)

    @property
    def _own_devices(self) -> Sequence[torch.device]:
        """The devices of this process."""
        return [self.root_device]

    @property
    def _is_fit(self) -> bool:
        """Whether the current run is a fit; between runs, whether the last one was."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING
