"""What a strategy states about itself. A new strategy sets these attributes in its class or its constructor."""

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.options import ActivationCheckpointing, Form, UnitChoice


class StrategyDescription(ParallelStrategy):
    """Mixin: all that the shared code knows of a strategy in advance. The state of a run is its `_sharded_state`."""

    strategy_name: str
    """The registered name, such as `"paral_ddp"`, which begins the line at the start of a fit.

    Where a strategy does not set it, the line begins with the name of its class.
    """

    forward_has_collectives: bool = False
    """Whether a forward pass of the module is *collective*.

    If so, ranks that have run out of evaluation data run padding batches until all ranks have.
    """

    shares_buffers: bool = True
    """Whether all ranks train and validate with rank 0's buffers, as under DDP."""

    _default_form: Form = "full"
    """The form of checkpoints where the user gives none.

    `"sharded"` also states that ranks may hold shards of weights. Then averaging callbacks keep shards, weights are
    restored after `setup` where the module is sharded before it, and a `CheckpointIO` of the user's own is refused.
    """

    _averaging_obstacle: str | None = None
    """Why callbacks cannot average weights under this strategy, with what to do; `None` if they can."""

    _units: UnitChoice = "auto"
    """The option `units`: which submodules are sharded together."""

    _min_params: int | None = None
    """The option `min_params`. Like `units`, it is checked with the module before other processes are started."""

    _activation_checkpointing: ActivationCheckpointing | None = None
    """Which units recompute their activations in the backward pass; `None`: no unit."""

    @property
    def dims(self) -> ParallelDims:
        """How the ranks are arranged: which draw samples of their own, and which hold the same tensors.

        The default is one replica per rank.
        """
        return ParallelDims(rank=self.global_rank, replicate=self.world_size)

    @property
    def _is_fit(self) -> bool:
        """Whether the current run is a fit; between runs, whether the last one was."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING
