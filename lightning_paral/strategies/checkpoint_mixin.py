"""The checkpoint of all our strategies: what is saved by one is loaded by every other, at any world size."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer

from lightning_paral.checkpoint.async_save import BackgroundSaver
from lightning_paral.checkpoint.io.storage import remove_at, without_scheme
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.state.hyper_parameters import with_full_modules
from lightning_paral.checkpoint.state.weights import (
    PACKAGE_STATE_KEY,
    load_weights,
    package_state,
    replicated_storages,
    sharded_state_dict,
)
from lightning_paral.checkpoint.tree import tensors_in
from lightning_paral.compat.lightning.strategies import averages_models
from lightning_paral.distributed.agreement import RankGroup, all_ranks
from lightning_paral.distributed.rng_state import current_states, restore_states
from lightning_paral.errors import CheckpointError, StorageOptionsError
from lightning_paral.model.engine_attributes import is_left_partitioned
from lightning_paral.options import DEFAULT_TIMEOUT, CheckpointOptions, Form
from lightning_paral.strategies.description import StrategyDescription
from lightning_paral.strategies.full_reads import FullTensorReaders

# Lightning keeps the loss scale under the name of the precision plugin, which depends on the strategy. Ours is under
# that of its DDP, too.
_LOSS_SCALES = ("MixedPrecision", "FSDPPrecision")


class CheckpointMixin(FullTensorReaders, StrategyDescription):
    """Mixin, placed before the Lightning base: saves and loads by the `ShardedState` of the run."""

    _checkpoint_options: CheckpointOptions
    _async_timeout: timedelta = DEFAULT_TIMEOUT
    _saver: BackgroundSaver | None = None
    _has_saved: bool = False
    _states_of_fit: dict[str, Any] | None = None
    """Random states at the end of the last fit. What runs after it draws numbers that a resumed fit must not miss."""
    _own_state: Mapping[str, Any] = MappingProxyType({})
    """What the checkpoint that was loaded last holds for this package only. Hooks see what they see under `ddp`."""
    _restores_after_setup: bool | None = None
    """Of one run, from `setup` on."""

    @property
    def _saves_users_way(self) -> bool:
        """Whether the user has given a `CheckpointIO` of their own."""
        return type(self.checkpoint_io) is not TorchCheckpointIO

    @property
    def _own_devices(self) -> Sequence[torch.device]:
        """The devices of this process."""
        return [self.root_device]

    @property
    def _checkpoint_form(self) -> Form:
        return self._checkpoint_options.form or self._default_form

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name: tensors of full shape, of which this rank may hold a shard."""
        assert self.lightning_module is not None
        state = self._sharded_state
        state.collect_writes()
        return sharded_state_dict(self.lightning_module, state.read_shard, self._checkpoint_options.save_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as torch does, with the names of the parameters in the groups."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._sharded_state.optimizer_state(optimizer)

    def _ranks(self) -> RankGroup:
        """Return the ranks that save together."""
        return all_ranks()

    @property
    def _is_running(self) -> bool:
        """Whether a run is between its beginning and its teardown."""
        return True

    @property
    def _saves_in_background(self) -> bool:
        """Whether a save may go on in the background: only if a `teardown` follows, which waits and reports failure."""
        assert self.lightning_module is not None
        return self._is_running and self.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `filepath`, all of it or nothing. *Collective* over the world during a run.

        Raises:
            CheckpointError: a rank could not write; on all ranks. What was at `filepath` is as it was.
        """
        from lightning_paral.checkpoint.save import SaveJob  # here, as torch's checkpoints take long to import

        assert self.lightning_module is not None
        if self._saves_users_way:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # the user's own way of saving
            return
        if storage_options is not None:
            raise StorageOptionsError(
                f"`Trainer.save_checkpoint(..., storage_options=...)` was given {storage_options!r:.100}, and "
                f"{type(self).__name__} takes none: options of fsspec belong in its configuration. Under paral_ddp "
                "and paral_dp a `CheckpointIO` of your own receives them."
            )
        checkpoint = dict(checkpoint)  # hooks keep the one that they were given
        ranks, world_size = self._ranks(), getattr(self, "world_size", 1)
        if ranks.world_size != world_size:  # after the run, without its process group
            if any(is_sharded(tensor) for _, tensor in tensors_in(checkpoint)):
                raise CheckpointError(
                    f"Saving {filepath} failed: each of {world_size} ranks holds a part "
                    "of the state, and their process group has ended, after a failure or for a run of another world "
                    "size. Save earlier, or only the weights: trainer.save_checkpoint(path, weights_only=True)."
                )
            if not self.is_global_zero:
                return
            ranks = RankGroup()  # rank 0 holds all there is
        state = checkpoint.get(type(self.precision_plugin).__qualname__)
        if _is_loss_scale(state):
            checkpoint.setdefault("MixedPrecision", state)
        states = None if self._is_running and self._is_fit else self._states_of_fit
        states = states or current_states(self._own_devices)
        checkpoint[PACKAGE_STATE_KEY] = package_state(
            self.lightning_module, self._checkpoint_options.save_frozen, ranks, states
        )
        if self._default_form == "sharded":
            with_full_modules(checkpoint, self.lightning_module.parameters(), self.full_parameter, ranks)
        path = ranks.gather(without_scheme(filepath))[0]
        replicated = replicated_storages(self.lightning_module)
        name, local_sgd = type(self).__name__, averages_models(self)
        stages = self.dims.stages if ranks.world_size == self.dims.num_ranks else None
        save = SaveJob.prepare(checkpoint, path, self._checkpoint_form, ranks, replicated, name, local_sgd, stages)
        save.is_first_of_run, self._has_saved = not self._has_saved, True
        if not self._checkpoint_options.async_save or not self._saves_in_background:
            if self._saver is not None:
                self._saver.wait()
            save.write(ranks)
            return
        if self._saver is None:
            self._saver = BackgroundSaver(self._async_timeout, pin=self.root_device.type == "cuda")
        self._saver.wait()  # what it writes is about to be overwritten
        staging = self._saver.staging
        ranks.run_on_all(f"Saving {path}", lambda: save.stage(staging))
        self._saver.start(save.write)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what is at `checkpoint_path`, verified; tensors are read when they are used. *Collective*.

        Raises:
            CheckpointError: there is none, it is damaged, it holds code and is not trusted, or it has no optimizer
                state to resume from.
        """
        from lightning_paral.checkpoint.load import load

        if self._saves_users_way:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            self._own_state = checkpoint.pop(PACKAGE_STATE_KEY, {})
            return checkpoint
        ranks = all_ranks()
        if weights_only is None:
            weights_only = self._checkpoint_options.weights_only
        checkpoint = load(ranks.gather(without_scheme(checkpoint_path))[0], ranks, weights_only=weights_only)
        if self.precision_plugin.precision == "16-mixed":
            for name in filter(lambda name: _is_loss_scale(checkpoint.get(name)), _LOSS_SCALES):
                checkpoint.setdefault(type(self.precision_plugin).__qualname__, checkpoint[name])
        self._own_state = checkpoint.pop(PACKAGE_STATE_KEY, {})
        if not self._checkpoint_options.restore_optimizer:
            checkpoint.setdefault("lr_schedulers", [])
        elif "optimizer_states" not in checkpoint and self._is_fit:
            raise CheckpointError(
                f"{checkpoint_path} holds no optimizer state that could be loaded: training cannot go on as it was. To "
                "go on with a new optimizer, say checkpoint=CheckpointOptions(restore_optimizer=False)."
            )
        return checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights and callbacks' states are restored after `setup`, because the module was not whole before.

        Otherwise they are restored before it, as under DDP, and callbacks have their states in `on_fit_start`.
        """
        if self._restores_after_setup is None:
            return self._default_form == "sharded" and self._module_is_sharded()
        return self._restores_after_setup

    def _module_is_sharded(self) -> bool:
        """Return whether this rank lacks values of the module before `setup`."""
        assert self.lightning_module is not None
        return self._sharded_state.is_sharded or any(map(is_left_partitioned, self.lightning_module.parameters()))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module its weights, of which each rank reads only what it holds."""
        assert self.lightning_module is not None
        left_out = self._own_state.get("frozen", ())
        state = self._sharded_state
        load_weights(self.lightning_module, checkpoint["state_dict"], strict=strict, left_out=left_out, into=state)
        state.finish_writing()

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether resuming restores optimizer states."""
        return self._checkpoint_options.restore_optimizer

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers their states, of which each rank reads only what it holds, and random numbers theirs."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has the state of {len(states)} optimizers, and configure_optimizers returned "
                f"{len(self.optimizers)}. Return as many, or say CheckpointOptions(restore_optimizer=False)."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self._sharded_state.load_optimizer_state(optimizer, state)
        restore_states(self._own_state.get("random_states", []), all_ranks(), self._own_devices)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, at once; what is none stays, with a warning. A user's `CheckpointIO` does it its way."""
        if self._saves_users_way:
            super().remove_checkpoint(filepath)
            return
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.after(partial(remove_at, without_scheme(filepath)))  # what replaces it may still be under way
        else:
            remove_at(without_scheme(filepath))

    def teardown(self) -> None:
        """Wait for a save in the background, and remember the random states of a fit for saves after it.

        Raises:
            CheckpointError: it failed.
        """
        if self._is_fit:
            self._states_of_fit = current_states(self._own_devices)
        saver, self._saver = self._saver, None
        self._restores_after_setup = None
        try:
            if saver is not None:
                saver.close()
        finally:
            super().teardown()


def _is_loss_scale(state: Any) -> bool:
    """Whether `state` is that of a `torch.amp.GradScaler`."""
    return isinstance(state, Mapping) and {"scale", "_growth_tracker"} <= state.keys()
