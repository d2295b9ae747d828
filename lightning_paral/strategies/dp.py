"""Data parallel within one process: a thread and a replica per device, gradients added up in the master."""

from concurrent.futures import ThreadPoolExecutor
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
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.process_group import check_device, made_group, release_process_group
from lightning_paral.engines.dp.checks import check_draws_all, check_replicable
from lightning_paral.engines.dp.step import ParallelStep
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.model.user_hooks import has_hook
from lightning_paral.option_types import checked_options
from lightning_paral.options import CheckpointOptions, as_checkpoint_options
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin
from lightning_paral.strategies.start_line import print_start_line


class ParalDPStrategy(CheckpointMixin, ParallelStrategy):
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
        self._threads: ThreadPoolExecutor | None = None
        self._step: ParallelStep | None = None

    # Process group: none. One process; what concerns ranks is about this one alone.

    def set_world_ranks(self) -> None:
        """Check what the Trainer has set, at the end of the Trainer's construction.

        Raises:
            ConfigurationError: several nodes or processes, devices that do not exist, or `sync_batchnorm`.
            PrivateNameError: the installed torch or Lightning lacks a name that this package uses.
        """
        check_names("torch", "lightning")
        environment = self.cluster_environment
        num_processes = environment.world_size() if environment and environment.creates_processes_externally else 1
        if self.num_nodes > 1 or num_processes > 1:
            found = f"num_nodes={self.num_nodes}" if self.num_nodes > 1 else f"{num_processes} processes were started"
            raise ConfigurationError(
                f"paral_dp is one process on one host, but {found}. Start a single process, or use paral_ddp."
            )
        for device in self._devices:
            check_device(device)
        if layer_sync_of(self) is not None and len(self._devices) > 1:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True) needs a process per device. Leave it out, so that each replica "
                "normalizes by its own samples, or use paral_ddp."
            )

    @property
    def root_device(self) -> torch.device:
        """The device of the module itself, replica 0."""
        return self._devices[0]

    @property
    def _devices(self) -> list[torch.device]:
        assert self.parallel_devices
        return self.parallel_devices

    _own_devices = _devices

    @property
    def global_rank(self) -> int:
        """0, whatever the environment says."""
        return 0

    local_rank = node_rank = global_rank

    @property
    def world_size(self) -> int:
        """1: the number of processes."""
        return 1

    @property
    def dims(self) -> ParallelDims:
        """One rank: the replicas of a step are threads of this process."""
        return ParallelDims()

    def barrier(self, name: str | None = None) -> None:
        """Nothing: there is no other process to wait for."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj`."""
        return obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return `tensor`.

        Raises:
            ConfigurationError: in a step that runs in several replicas, of which each has its own part of the batch.
        """
        if self._step is not None and self._step.num_running > 1:
            raise ConfigurationError(
                "self.all_gather was called in a step under paral_dp, which runs in replicas, each with its own part "
                "of the batch: one process has nothing to gather from. Use paral_ddp, or gather in an epoch hook."
            )
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return `decision`."""
        return decision

    def setup_environment(self) -> None:
        """Set up the device, without the process group that an earlier run of several ranks has left."""
        self.set_world_ranks()
        group = made_group()
        if group is not None and group.size() > 1:
            release_process_group()
        super().setup_environment()

    @property
    def _is_running(self) -> bool:
        return self._step is not None

    # Model wrapping: none. Steps are run by `ParallelStep`, and the module stays what it is.

    def setup(self, trainer: Trainer) -> None:
        """Move the module to the first device and make a thread for each further one."""
        module = self.lightning_module
        assert module is not None
        if len(self._devices) > 1:
            check_replicable(module)
            if trainer.state.fn == TrainerFn.FITTING:
                check_embeddings(module, len(self._devices))
        super().setup(trainer)
        print_start_line(trainer, self)
        self._threads = ThreadPoolExecutor(max(1, len(self._devices) - 1), thread_name_prefix="paral_dp")
        self._step = ParallelStep(module, self._devices, self._threads)
        hooks = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad", "backward")
        self._changes_before_backward = has_hook(module, hooks)

    def model_to_device(self) -> None:
        """Move the module to the first device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the whole batch, with the graph through all replicas."""
        assert self._step is not None
        with self.precision_plugin.train_step_context():
            return self._step.run("training_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, through all replicas."""
        assert self._step is not None
        if self._changes_before_backward and closure_loss.requires_grad:
            step = self._step
            # After `on_before_backward`.
            closure_loss.register_hook(lambda _: step.copy_values())  # type: ignore[no-untyped-call]
        result = super().backward(closure_loss, *args, **kwargs)
        self._step.forget()
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the replicas' outputs, gathered."""
        assert self._step is not None
        with self.precision_plugin.val_step_context():
            return self._step.run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the replicas' outputs, gathered."""
        assert self._step is not None
        with self.precision_plugin.test_step_context():
            return self._step.run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the replicas' outputs, gathered in the order of the samples."""
        assert self._step is not None
        with self.precision_plugin.predict_step_context():
            return self._step.run("predict_step", *args, **kwargs)

    # Sampler injection: none. The loader draws whole batches, as for one process.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a `DistributedSampler` that draws everything; Lightning's count each device as a process."""
        return {"num_replicas": self.dims.data_size, "rank": self.dims.data_rank}

    def process_dataloader(self, dataloader: object) -> object:
        """Return `dataloader`.

        Raises:
            ConfigurationError: its sampler leaves samples to other processes, of which there are none.
        """
        check_draws_all(dataloader)
        return dataloader

    # Checkpoint: `CheckpointMixin`. One ordinary Lightning file; the module is not wrapped, so its keys are its own.

    def teardown(self) -> None:
        """Undo the setup, and end the threads."""
        self._step = None
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        super().teardown()
