"""Data parallel in one process: a thread and a replica per device; gradients are summed in the user's module."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from lightning_paral.compat.lightning.strategies import layer_sync_of
from lightning_paral.compat.private_name import check_names
from lightning_paral.distributed.process_group import owned_group, release_process_group
from lightning_paral.engines.dp.checks import check_draws_all, check_one_process, check_replicable
from lightning_paral.engines.dp.run import DPRun
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import check_embeddings
from lightning_paral.option_types import takes
from lightning_paral.options import StrategyOptions
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin
from lightning_paral.strategies.start_line import print_start_line


@dataclass(frozen=True, kw_only=True)
class DPOptions(StrategyOptions):
    """The options of `ParalDPStrategy`."""

    advice: ClassVar[dict[str, str]] = {
        **StrategyOptions.advice,
        "timeout": "Use paral_ddp, which has several processes; paral_dp has one.",
        "process_group_backend": "Use paral_ddp, which has several processes; paral_dp has one.",
    }


class ParalDPStrategy(CheckpointMixin, ParallelStrategy):
    """Use all devices of a node from one process: each step divides its batch among replicas created for that step.

    Select it by name, `Trainer(strategy="paral_dp", devices=2)`. Use it to experiment on several devices without
    starting processes, for example in a notebook; otherwise `paral_ddp` is nearly always faster
    (docs/strategies/dp.md).

    Each step divides the batch (`lightning_paral.engines.dp.scatter`) and copies the module to the other devices. Each
    replica runs the full step, loss included, in its own thread. The losses are weighted by the sizes of the
    sub-batches: if the loss is a mean over samples, loss and gradients equal those of the undivided batch. One backward
    pass runs through all replicas, and their gradients are summed in the module, in a fixed order. Outputs are
    concatenated (`lightning_paral.engines.dp.gather`).

    The module itself is replica 0. Changes that a step makes to its buffers and attributes persist; changes to those of
    the other replicas are lost. Values that the replicas log with `self.log` are merged, and metrics see every sample
    once. Manual optimization is refused on several devices: use `paral_ddp`.

    For Lightning there is one process: `trainer.world_size` is 1, no sampler is injected, and the loader's batch size
    counts the samples of all devices together.

    Options are keyword-only; `__init__` documents them.

    Raises:
        ConfigurationError: when the Trainer is created: several nodes or processes, devices that do not exist, or
            `sync_batchnorm`. When a run begins: the module cannot be replicated.
    """

    strategy_name = "paral_dp"
    activation_checkpointing = None
    """The option, which this strategy does not have."""

    @takes(DPOptions)
    def __init__(self, options: DPOptions) -> None:
        super().__init__(**options.of_trainer)
        self._checkpoint_options = options.checkpoint_options
        self.num_nodes = 1
        self._dp: DPRun | None = None  # set during a run

    # Process group: none. The process is rank 0 of 1, whatever environment variables say.

    @property
    def global_rank(self) -> int:
        """0, the rank of the only process."""
        return 0

    local_rank = node_rank = global_rank

    @property
    def world_size(self) -> int:
        """1, the number of processes."""
        return 1

    def set_world_ranks(self) -> None:
        """Check the Trainer's settings; the Trainer calls this at the end of its construction.

        Raises:
            ConfigurationError: several nodes or processes, devices that do not exist, or `sync_batchnorm`.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
        """
        check_names("torch", "lightning")
        environment = self.cluster_environment
        num_processes = environment.world_size() if environment and environment.creates_processes_externally else 1
        check_one_process(
            self._own_devices, self.num_nodes, num_processes, sync_batchnorm=layer_sync_of(self) is not None
        )

    @property
    def root_device(self) -> torch.device:
        """The device of the module itself, replica 0."""
        return self._own_devices[0]

    @property
    def _own_devices(self) -> list[torch.device]:
        assert self.parallel_devices
        return self.parallel_devices

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return `tensor`.

        Raises:
            ConfigurationError: it is called in a step that runs in several replicas, each with a part of the batch.
        """
        if self._dp is not None and self._dp.num_running_replicas > 1:
            raise ConfigurationError(
                "self.all_gather was called in a step under paral_dp, where each replica has a part of the batch. "
                "There is one process, and no other rank to gather from. Use paral_ddp, or gather in an epoch hook."
            )
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Do nothing."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj`."""
        return obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor`."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return `decision`."""
        return decision

    def setup_environment(self) -> None:
        """Set up the device, and release the process group of an earlier run with several ranks."""
        self.set_world_ranks()
        group = owned_group()
        if group is not None and group.size() > 1:
            release_process_group()
        super().setup_environment()

    # Model wrapping: none. `DPRun` runs the steps in replicas of the module.

    def setup(self, trainer: Trainer) -> None:
        """Move the module to the first device, and start a thread for each of the other devices.

        Raises:
            ConfigurationError: the module cannot be replicated.
        """
        module = self.lightning_module
        assert module is not None
        if len(self._own_devices) > 1:
            check_replicable(module, is_fit=self._is_fit)
            if self._is_fit:
                check_embeddings(module, len(self._own_devices))
        super().setup(trainer)
        if self._is_fit:
            print_start_line(trainer, self)
        self._dp = DPRun(module, self._own_devices)

    def model_to_device(self) -> None:
        """Move the module to the first device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the full batch; its autograd graph includes all replicas."""
        with self.precision_plugin.train_step_context():
            return self._engine.step("training_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass through all replicas."""
        return self._engine.backward(super().backward, closure_loss, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the concatenated outputs of the replicas."""
        with self.precision_plugin.val_step_context():
            return self._engine.step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the concatenated outputs of the replicas."""
        with self.precision_plugin.test_step_context():
            return self._engine.step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the concatenated outputs of the replicas, in the order of the samples."""
        with self.precision_plugin.predict_step_context():
            return self._engine.step("predict_step", *args, **kwargs)

    @property
    def _engine(self) -> DPRun:
        assert self._dp is not None
        return self._dp

    # Sampler injection: none. The loader draws full batches, as for one process.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a `DistributedSampler` that draws all samples; Lightning's would count devices as processes."""
        return {"num_replicas": self.dims.data_size, "rank": self.dims.data_rank}

    def process_dataloader(self, dataloader: object) -> object:
        """Return `dataloader`.

        Raises:
            ConfigurationError: its sampler leaves samples to other processes, which do not exist.
        """
        check_draws_all(dataloader)
        return dataloader

    # Checkpoint: see `CheckpointMixin`. By default, one ordinary Lightning file.

    @property
    def _is_running(self) -> bool:
        return self._dp is not None

    def teardown(self) -> None:
        """Stop the threads, and end the run; see `CheckpointMixin.teardown`.

        Raises:
            CheckpointError: a background save failed.
        """
        run, self._dp = self._dp, None
        if run is not None:
            run.end()
        super().teardown()
