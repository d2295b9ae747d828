"""Data parallel within one process: a thread and a replica per device, gradients added up in the master."""

from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.compat.checks import check_names
from lightning_paral.compat.lightning.strategies import layer_sync_of
from lightning_paral.distributed.process_group import owned_group, release_process_group
from lightning_paral.engines.dp.checks import check_draws_all, check_one_process, check_replicable
from lightning_paral.engines.dp.run import DPRun
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.option_types import checked_options
from lightning_paral.options import CheckpointOptions, as_checkpoint_options
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin
from lightning_paral.strategies.one_process import OneProcess
from lightning_paral.strategies.start_line import print_start_line


class ParalDPStrategy(OneProcess, CheckpointMixin, ParallelStrategy):
    """One process for all devices of a host: each step divides its batch among replicas that live for that step.

    Selected by name, `Trainer(strategy="paral_dp", devices=2)`. For trying things out on several devices without
    starting processes, in a notebook, say; `paral_ddp` is faster in nearly every other case (docs/strategies/dp.md).

    In each step the batch is divided (`lightning_paral.engines.dp.scatter`), the module is copied to the further
    devices, and every replica runs the whole step, loss included, in a thread of its own. The losses are weighed by the
    sizes of the sub-batches, so that where the loss is a mean over samples, loss and gradients are those of the whole
    batch. One backward pass goes through all replicas; their gradients are added up in the module, in a fixed order.
    Outputs are put together again (`lightning_paral.engines.dp.gather`).

    The module itself is replica 0: buffers and attributes that a step changes there stay, those of the other replicas
    are lost. What a step logs with `self.log` is merged, and metrics see every sample once. Manual optimization works
    as long as all replicas make the same calls in the same order.

    To Lightning this is one process: `trainer.world_size` is 1, no sampler is injected, and the loader's batch size is
    that of all devices together.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's
            `ParallelStrategy`; the Trainer sets them.
        checkpoint: `"full"`, one file, the default; `"sharded"`, a folder; or `CheckpointOptions` with more.

    Raises:
        ConfigurationError: when the Trainer is made: several nodes or processes, devices that do not exist, or
            `sync_batchnorm`; when a run begins: modules that cannot be replicated.
    """

    strategy_name = "paral_dp"

    @checked_options
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        checkpoint: CheckpointOptions | Literal["full", "sharded"] | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._checkpoint_options = as_checkpoint_options(checkpoint)
        self.num_nodes = 1
        self._dp: DPRun | None = None  # of one run

    # Process group: none. There is one process.

    def set_world_ranks(self) -> None:
        """Check what the Trainer has set, at the end of the Trainer's construction.

        Raises:
            ConfigurationError: several nodes or processes, devices that do not exist, or `sync_batchnorm`.
            PrivateNameError: the installed torch or Lightning lacks a name that this package uses.
        """
        check_names("torch", "lightning")
        environment = self.cluster_environment
        num_processes = environment.world_size() if environment and environment.creates_processes_externally else 1
        check_one_process(self._own_devices, self.num_nodes, num_processes, syncs=layer_sync_of(self) is not None)

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
            ConfigurationError: in a step that runs in several replicas, of which each has its own part of the batch.
        """
        if self._dp is not None and self._dp.num_running_replicas > 1:
            raise ConfigurationError(
                "self.all_gather was called in a step under paral_dp, which runs in replicas, each with its own part "
                "of the batch: one process has nothing to gather from. Use paral_ddp, or gather in an epoch hook."
            )
        return tensor

    def setup_environment(self) -> None:
        """Set up the device; release the process group that an earlier run of several ranks has left."""
        self.set_world_ranks()
        group = owned_group()
        if group is not None and group.size() > 1:
            release_process_group()
        super().setup_environment()

    # Model wrapping: none. `DPRun` runs the steps in replicas, and the module stays what it is.

    def setup(self, trainer: Trainer) -> None:
        """Move the module to the first device, and start a thread for each other one.

        Raises:
            ConfigurationError: the module cannot be replicated.
        """
        module = self.lightning_module
        assert module is not None
        if len(self._own_devices) > 1:
            check_replicable(module)
            if trainer.state.fn == TrainerFn.FITTING:
                check_embeddings(module, len(self._own_devices))
        super().setup(trainer)
        print_start_line(trainer, self)
        self._dp = DPRun(module, self._own_devices)

    def model_to_device(self) -> None:
        """Move the module to the first device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the whole batch, with the graph through all replicas."""
        with self.precision_plugin.train_step_context():
            return self._engine.step("training_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, through all replicas."""
        return self._engine.backward(super().backward, closure_loss, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the replicas' outputs, gathered."""
        with self.precision_plugin.val_step_context():
            return self._engine.step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the replicas' outputs, gathered."""
        with self.precision_plugin.test_step_context():
            return self._engine.step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the replicas' outputs, gathered in the order of the samples."""
        with self.precision_plugin.predict_step_context():
            return self._engine.step("predict_step", *args, **kwargs)

    @property
    def _engine(self) -> DPRun:
        assert self._dp is not None
        return self._dp

    # Sampler injection: none. The loader draws whole batches, as for one process.

    def process_dataloader(self, dataloader: object) -> object:
        """Return `dataloader`.

        Raises:
            ConfigurationError: its sampler leaves samples to other processes, of which there are none.
        """
        check_draws_all(dataloader)
        return dataloader

    # Checkpoint: `CheckpointMixin`. One ordinary Lightning file; the module is not wrapped, so its keys are its own.

    @property
    def _is_running(self) -> bool:
        return self._dp is not None

    def teardown(self) -> None:
        """End the threads, and what `CheckpointMixin` and Lightning end.

        Raises:
            CheckpointError: a save in the background failed.
        """
        run, self._dp = self._dp, None
        if run is not None:
            run.end()
        super().teardown()
