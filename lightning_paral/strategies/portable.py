"""What all our strategies share: one process group per run, on CPU as on CUDA, checked before anything is launched."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.commit import remove
from lightning_paral.checkpoint.loading import load
from lightning_paral.checkpoint.optimizer import group_names, load_state, state_of
from lightning_paral.checkpoint.random import restore_states
from lightning_paral.checkpoint.ranks import all_ranks
from lightning_paral.checkpoint.saving import OWN_KEY, Form, Save
from lightning_paral.checkpoint.stored import read_into
from lightning_paral.checkpoint.weights import held_state_dict, load_weights, own_state
from lightning_paral.config import Checkpointing
from lightning_paral.errors import CheckpointError, ConfigurationError
from lightning_paral.launcher import CheckedSubprocessLauncher
from lightning_paral.process_group import (
    ProcessGroup,
    backend_for,
    check_device,
    check_local_rank,
    join_process_group,
    name_timeout,
)


class PortableStrategy(ParallelStrategy):
    """Mixin, placed before the Lightning base: `class ParalDDPStrategy(PortableStrategy, DDPStrategy)`.

    It keeps one thing, the process group of the current run, and reads what the Lightning bases hold.
    """

    _process_group: ProcessGroup | None = None
    _checkpointing: Checkpointing
    _default_form: Form = "full"
    _process_group_backend: str | None
    _timeout: timedelta | None
    num_nodes: int
    num_processes: int
    set_world_ranks: Callable[[], None]

    def _configure_launcher(self) -> None:
        # The last thing a Trainer does to its strategy while it is being built, and in every process.
        check_local_rank(self.local_rank, self.num_processes)
        check_device(self.root_device)
        backend_for(self.root_device, self._process_group_backend)
        super()._configure_launcher()
        if type(self._launcher).__name__ == "_SubprocessScriptLauncher":
            assert self.cluster_environment is not None
            self._launcher = CheckedSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Join or make the process group. *Collective* over the world."""
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        assert self._timeout is not None
        self._process_group = join_process_group(
            self.cluster_environment, self.root_device, self._process_group_backend, self._timeout
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. *Collective*; does nothing before the group is made and after it is released."""
        if dist.is_initialized():
            on_cuda = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if on_cuda else None)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` over the ranks, in place, and return it; anything but a tensor is returned as it is.

        *Collective* over `group` (all ranks if `None`). Unlike Lightning's, it also averages CPU tensors in a CUDA run,
        and waits for no extra barrier. Integer averages round towards zero.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        average = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        if average:
            operation = dist.ReduceOp.SUM  # gloo has no AVG
        else:
            operation = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        dist.all_reduce(tensor, op=operation, group=group)
        if average:
            rounding_mode = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
            tensor.div_(dist.get_world_size(group), rounding_mode=rounding_mode)
        return tensor

    # Checkpoint

    @property
    def _checkpoint_form(self) -> Form:
        return self._checkpointing.form or self._default_form

    def _held(self, parameter: Parameter) -> Tensor:
        """Return what this rank has of `parameter`: whole, a DTensor, or a run."""
        return parameter.detach()

    def _fill(self, parameter: Parameter, stored: Tensor) -> bool:
        """Put a stored tensor into `parameter`; `False` if `Module.load_state_dict` can do that."""
        if isinstance(parameter, DTensor):
            read_into(stored, parameter.detach())
        return isinstance(parameter, DTensor)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name: tensors of true shapes, of which this rank may hold a part."""
        assert self.lightning_module is not None
        return held_state_dict(self.lightning_module, self._held, self._checkpointing.save_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as torch does, with the names of the parameters in the groups."""
        assert self.lightning_module is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return state_of(optimizer, group_names(optimizer, self.lightning_module))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `filepath`, all of it or nothing. *Collective* over the world during a run.

        Raises:
            CheckpointError: a rank could not write; on all ranks. What was at `filepath` is as it was.
        """
        assert self.lightning_module is not None
        if self._checkpoint_io is not None and type(self._checkpoint_io) is not TorchCheckpointIO:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # the user's own way of saving
            return
        if storage_options is not None:
            raise ConfigurationError(
                "storage_options are not supported: options of fsspec belong into its configuration."
            )
        ranks = all_ranks()
        if ranks.world_size < self.world_size and not self.is_global_zero:
            return  # after the run, without a process group: rank 0 holds all there is
        checkpoint[OWN_KEY] = own_state(self.lightning_module, self._checkpointing.save_frozen, ranks)
        path = ranks.gather(str(filepath))[0]
        replicated = {parameter.untyped_storage().data_ptr() for parameter in self.lightning_module.parameters()}
        save = Save.prepare(checkpoint, path, self._checkpoint_form, ranks, replicated, type(self).__name__)
        save.write(ranks)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what is at `checkpoint_path`, verified; tensors are read when they are used. *Collective*.

        Raises:
            CheckpointError: there is none, it is damaged, or it holds code and `weights_only=False` was not given.
        """
        if self._checkpoint_io is not None and type(self._checkpoint_io) is not TorchCheckpointIO:
            return super().load_checkpoint(checkpoint_path, weights_only)
        ranks = all_ranks()
        checkpoint = load(ranks.gather(str(checkpoint_path))[0], ranks, weights_only=weights_only is not False)
        if not self._checkpointing.restore_optimizer:
            checkpoint.setdefault("lr_schedulers", [])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module its weights, of which each rank reads only what it holds."""
        assert self.lightning_module is not None
        left_out = checkpoint.get(OWN_KEY, {}).get("frozen", ())
        load_weights(self.lightning_module, checkpoint["state_dict"], strict=strict, left_out=left_out, fill=self._fill)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether resuming restores optimizer states."""
        return self._checkpointing.restore_optimizer

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers their states, of which each rank reads only what it holds, and random numbers theirs."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has the state of {len(states)} optimizers, and configure_optimizers returned "
                f"{len(self.optimizers)}. Return as many, or say Checkpointing(restore_optimizer=False)."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self._load_optimizer_state(optimizer, state)
        restore_states(checkpoint.get(OWN_KEY, {}).get("random_states", []), all_ranks())

    def _load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        assert self.lightning_module is not None
        load_state(optimizer, group_names(optimizer, self.lightning_module), state)
        _optimizer_to_device(optimizer, self.root_device)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, at once."""
        if self.is_global_zero:
            remove(Path(filepath))

    def on_exception(self, exception: BaseException) -> None:
        """Name the timeout in the message of a collective that ran into it."""
        super().on_exception(exception)
        if self._timeout is not None:
            name_timeout(exception, self._timeout, f"{type(self).__name__}(timeout=...)")

    def teardown(self) -> None:
        """Undo the setup, and destroy the process group if this run made it."""
        try:
            super().teardown()
        finally:
            if self._process_group is not None:
                self._process_group.release()
                self._process_group = None
