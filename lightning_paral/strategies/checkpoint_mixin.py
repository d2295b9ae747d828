"""Save, load and read in full what a strategy trains: a checkpoint of one can be loaded by every other."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.background import BackgroundSaver
from lightning_paral.checkpoint.optimizer_state import EndedOptimizers
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.storage import remove_at, without_scheme
from lightning_paral.checkpoint.tree import PACKAGE_STATE_KEY, tensors_in
from lightning_paral.checkpoint.weights import (
    load_weights,
    package_state,
    sharded_state_dict,
    without_engine,
)
from lightning_paral.distributed.exchange import RankGroup, all_ranks, explain
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.rng_state import current_states, restore_states
from lightning_paral.errors import CheckpointError, StorageOptionsError
from lightning_paral.model.engine_attributes import is_left_partitioned
from lightning_paral.model.user_hooks import trainer_of
from lightning_paral.options import DEFAULT_TIMEOUT, CheckpointOptions, Form

_LOSS_SCALES = ("MixedPrecision", "FSDPPrecision")
"""Names of precision plugins, under which Lightning saves the loss scale; the first is that of DDP."""


class CheckpointMixin(ParallelStrategy):
    """Mixin, placed before the Lightning base: save, load and read through the `ShardedState` of the run.

    A mixin and no part, because `paral_dp`, which has one process, shares it, and Lightning calls most of its methods.
    """

    _ended: ClassVar[EndedOptimizers] = EndedOptimizers()
    """The optimizers of past runs under any strategy, because a module may be trained by several strategies in turn."""
    _default_form: Form = "full"
    """The form of checkpoints if the user does not choose one.

    `"sharded"` also declares that ranks may hold shards of weights. Averaging callbacks then keep shards, weights are
    restored after `setup` if the module is sharded before it, and a user's `CheckpointIO` is rejected.
    """
    _checkpoint_options: CheckpointOptions
    _async_timeout: timedelta = DEFAULT_TIMEOUT
    """How long ranks wait for each other in a background save."""
    _saver: BackgroundSaver | None = None
    _rng_states_of_fit: dict[str, Any] | None = None
    """The states of the random generators at the end of the last fit.

    A checkpoint saved later contains these, so that numbers drawn after the fit do not change a resumed fit.
    """
    _own_state: Mapping[str, Any] = MappingProxyType({})
    """The entries for this package in the checkpoint that was loaded last. They are removed before hooks see it."""
    _restores_after_setup: bool | None = None
    """The value of `restore_checkpoint_after_setup`, fixed from `setup` to `teardown`."""

    # What is saved and read

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of the ranks; by default, there is one."""
        return ParallelDims()

    @property
    def _own_devices(self) -> Sequence[torch.device]:
        """The devices of this process."""
        return [self.root_device]

    @property
    def _is_fit(self) -> bool:
        """Whether the current run is a fit; between runs, whether the last one was."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    @property
    def _is_running(self) -> bool:
        """Whether a run has begun and its teardown is not finished."""
        return True

    @property
    def _sharded_state(self) -> ShardedState:
        """The current state of the module, during a run or between runs."""
        assert self.lightning_module is not None
        return ShardedState(self.lightning_module, self.optimizers, self.root_device, self._ended)

    # Readers for hooks: every rank gets the same values

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the global 2-norm of the gradients before clipping, as a 0-dimensional tensor of fp32 or wider.

        *Collective* over the world if gradients are sharded.

        Args:
            optimizer: count only the gradients of the parameters of this optimizer; `None` counts all parameters.

        Raises:
            GradientsNotReadyError: under ZeRO, unless called between the last backward pass and the optimizer step.
        """
        return self._sharded_state.gradient_norm(optimizer)

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the gradient of `parameter`, averaged over the ranks; `None` if it has none.

        The copy has the device and dtype of the parameter; under ZeRO it is fp32. *Collective* over the world if
        gradients are sharded.

        Raises:
            GradientsNotReadyError: under ZeRO, unless called between the last backward pass and the optimizer step.
        """
        return self._sharded_state.full_gradient(parameter)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter`, in its own dtype, or in fp32 if the optimizer has fp32 master weights.

        *Collective* over the world if parameters or master weights are sharded.
        """
        return self._sharded_state.full_parameter(parameter)

    def full_state_dict(self, module: Module | None = None) -> dict[str, Any]:
        """Return `module.state_dict()` with full copies of parameters in host memory, on every rank.

        Parameters are gathered one after the other, and are those that `full_parameter` returns. *Collective* over the
        world: call it on all ranks, and write a file on one of them.

        Args:
            module: the LightningModule, which is the default, or a part of it.
        """
        self.lightning_module_state_dict()  # collects what user code has written, and buffers of other stages
        assert self.lightning_module is not None
        return sharded_state_dict(module or self.lightning_module, lambda p: self.full_parameter(p).cpu(), True)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer's state `key` of `parameter`, such as `"exp_avg"`.

        *Collective* over the world if the state is sharded.

        Raises:
            ValueError: the state does not exist; optimizers create their states in the first step.
        """
        return self._sharded_state.full_optimizer_state(parameter, key)

    # Save

    @property
    def _has_users_checkpoint_io(self) -> bool:
        """Whether the user passed their own `CheckpointIO`."""
        return type(self.checkpoint_io) is not TorchCheckpointIO

    @property
    def _checkpoint_form(self) -> Form:
        return self._checkpoint_options.form or self._default_form

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name, as tensors of full shape. This rank may hold only a shard of a tensor."""
        assert self.lightning_module is not None
        state = self._sharded_state
        state.collect_writes()
        return sharded_state_dict(self.lightning_module, state.read_shard, self._checkpoint_options.save_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer in torch's format, with the parameters' names added to each group."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._sharded_state.optimizer_state(optimizer)

    @property
    def _can_save_in_background(self) -> bool:
        """Whether a `teardown` will follow, which waits for a background save and reports its failure."""
        assert self.lightning_module is not None
        return self._is_running and self.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `filepath`, completely or not at all. *Collective* over the world during a run.

        Raises:
            CheckpointError: a rank could not write; raised on all ranks. An earlier checkpoint at `filepath` is intact.
            ConfigurationError: the optimizer's state was lost at the end of the run.
            StorageOptionsError: `storage_options` were given, but no `CheckpointIO` that accepts them.
        """
        from lightning_paral.checkpoint.save import SaveJob  # here, because Distributed Checkpoint is slow to import

        assert self.lightning_module is not None
        if self._has_users_checkpoint_io:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise StorageOptionsError(
                f"`Trainer.save_checkpoint(..., storage_options=...)` was given {storage_options!r:.100}, and "
                f"{type(self).__name__} accepts none. Set the options in fsspec's configuration. Under paral_ddp and "
                "paral_dp, your own `CheckpointIO` receives them."
            )
        checkpoint = dict(checkpoint)  # hooks keep the original
        ranks = self._saving_ranks(checkpoint, filepath)
        if ranks is None:
            return
        self._add_package_state(checkpoint, ranks)
        path = ranks.gather(without_scheme(filepath))[0]
        name = type(self).__name__
        stages = self.dims.stages if ranks.world_size == self.dims.num_ranks else None
        checkpoint = self._without_others(checkpoint)
        save = SaveJob.prepare(checkpoint, path, self._checkpoint_form, ranks, strategy=name, stages=stages)
        if not self._checkpoint_options.async_save or not self._can_save_in_background:
            if self._saver is not None:
                self._wait_for_background_save()
            save.write(ranks)
            return
        if self._saver is None:
            self._saver = BackgroundSaver(self._async_timeout, pin=self.root_device.type == "cuda")
        self._saver.wait()  # the staging buffers of the previous save are about to be overwritten
        staging = self._saver.staging
        ranks.run_on_all(f"Saving {path}", lambda: save.stage(staging))
        self._saver.start(save.write)

    def _without_others(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return `checkpoint` without the tensors of which only other pipeline stages have elements."""
        return checkpoint

    def finish_saving(self) -> None:
        """Wait until a save in the background has finished.

        Raises:
            CheckpointError: the save failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def _wait_for_background_save(self) -> None:
        """Wait for a background save. After an exception it may fail because a rank has died; then warn."""
        assert self._saver is not None
        try:
            self._saver.wait()
        except Exception as error:
            if self._can_save_in_background:
                raise
            rank_zero_warn(f"The background save that was in progress failed: {explain(error)}")

    def _saving_ranks(self, checkpoint: dict[str, Any], filepath: Any) -> RankGroup | None:
        """Return the ranks that save `checkpoint`; `None` if this rank is not one of them.

        Raises:
            CheckpointError: the checkpoint contains shards, and the process group of the ranks that hold them is gone.
        """
        ranks, world_size = all_ranks(), getattr(self, "world_size", 1)
        if ranks.world_size == world_size:
            return ranks
        if any(is_sharded(tensor) for _, tensor in tensors_in(checkpoint)):
            raise CheckpointError(
                f"Saving {filepath} failed: each of {world_size} ranks holds a shard of the state, and their process "
                "group was released after a failure, or by a run with a different world size. Save earlier, or save "
                "only the weights: trainer.save_checkpoint(path, weights_only=True)."
            )
        return RankGroup() if self.is_global_zero else None

    def _add_package_state(self, checkpoint: dict[str, Any], ranks: RankGroup) -> None:
        """Add to `checkpoint` what this package needs to load it. *Collective* over `ranks`."""
        assert self.lightning_module is not None
        _copy_loss_scale(checkpoint, (type(self.precision_plugin).__qualname__,), to=_LOSS_SCALES[0])
        rng_states = None if self._is_running and self._is_fit else self._rng_states_of_fit
        rng_states = rng_states or current_states(self._own_devices)
        added = package_state(self.lightning_module, self._checkpoint_options.save_frozen, ranks, rng_states)
        if ranks.world_size < self.dims.num_ranks:  # rank 0 saves alone; those of the others are most often equal
            added["random_states"] *= self.dims.num_ranks
        checkpoint[PACKAGE_STATE_KEY] = added
        if self._default_form == "sharded":
            without_engine(checkpoint, self.lightning_module.parameters(), self.full_parameter, ranks)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the background save if one is running; keep any other folder, with a warning.

        A `CheckpointIO` that the user passed removes checkpoints in its own way.
        """
        if self._has_users_checkpoint_io:
            super().remove_checkpoint(filepath)
            return
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.after(partial(remove_at, without_scheme(filepath)))  # its replacement may not be complete yet
        else:
            remove_at(without_scheme(filepath))

    # Load

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint at `checkpoint_path`, verified. Tensors are read when they are used. *Collective*.

        Raises:
            CheckpointError: it is missing or damaged, has untrusted code, or has no optimizer state to resume from.
        """
        from lightning_paral.checkpoint.load import load

        if self._has_users_checkpoint_io:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            only_weights = self._checkpoint_options.weights_only if weights_only is None else weights_only
            ranks = all_ranks()
            checkpoint = load(ranks.gather(without_scheme(checkpoint_path))[0], ranks, weights_only=only_weights)
        if self.precision_plugin.precision == "16-mixed":
            _copy_loss_scale(checkpoint, _LOSS_SCALES, to=type(self.precision_plugin).__qualname__)
        self._own_state = checkpoint.pop(PACKAGE_STATE_KEY, {})
        if not self._checkpoint_options.restore_optimizer:
            checkpoint.setdefault("lr_schedulers", [])
        elif "optimizer_states" not in checkpoint and self._is_fit:
            raise CheckpointError(
                f"{checkpoint_path} has no optimizer state that could be loaded, so training cannot resume. To "
                "continue with a new optimizer, pass checkpoint=CheckpointOptions(restore_optimizer=False)."
            )
        return checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights and callbacks' states are restored after `setup`, because ranks lack values before it.

        Otherwise they are restored before `setup`, as under DDP, and callbacks have their states in `on_fit_start`.
        """
        if self._restores_after_setup is None:
            return self._default_form == "sharded" and self._module_is_sharded()
        return self._restores_after_setup

    def _module_is_sharded(self) -> bool:
        """Return whether this rank lacks values of the module before `setup`."""
        assert self.lightning_module is not None
        return self._sharded_state.is_sharded or any(map(is_left_partitioned, self.lightning_module.parameters()))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights into the module. Of parameters that are sharded, each rank reads only its shards."""
        assert self.lightning_module is not None
        left_out = self._own_state.get("frozen", ())
        state = self._sharded_state
        load_weights(self.lightning_module, checkpoint["state_dict"], strict=strict, left_out=left_out, into=state)
        state.finish_writing()

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether resuming restores the states of the optimizers."""
        return self._checkpoint_options.restore_optimizer

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, of which each rank reads only its shards, and the random states.

        Raises:
            CheckpointError: the checkpoint has states for a different number of optimizers, or for different ones.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(self.optimizers)}. Return the same number, or pass CheckpointOptions(restore_optimizer=False)."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self._sharded_state.load_optimizer_state(optimizer, state)
        restore_states(self._own_state.get("random_states", []), all_ranks(), self._own_devices)

    def teardown(self) -> None:
        """Wait for a background save, and keep the random states of a fit for later saves.

        Raises:
            CheckpointError: the background save failed.
        """
        self._restores_after_setup = None
        if self._is_fit:
            self._rng_states_of_fit = current_states(self._own_devices)
        saver, self._saver = self._saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            super().teardown()


def _copy_loss_scale(checkpoint: dict[str, Any], names: Sequence[str], *, to: str) -> None:
    """Copy the state of a `torch.amp.GradScaler` under one of `names` in `checkpoint` to the name `to`."""
    for name in names:
        state = checkpoint.get(name)
        if isinstance(state, Mapping) and {"scale", "_growth_tracker"} <= state.keys():
            checkpoint.setdefault(to, state)
