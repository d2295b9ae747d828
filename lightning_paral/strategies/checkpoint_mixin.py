"""Save and load checkpoints: a checkpoint of one strategy can be loaded by every other, at any world size."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning_paral.checkpoint.io.urls import without_scheme
from lightning_paral.checkpoint.state.loss_scale import add_loss_scale_of_plugin
from lightning_paral.checkpoint.state.weights import PACKAGE_STATE_KEY, load_weights
from lightning_paral.distributed.exchange import all_ranks
from lightning_paral.distributed.rng_state import restore_states
from lightning_paral.errors import CheckpointError
from lightning_paral.model.engine_attributes import is_left_partitioned
from lightning_paral.strategies.checkpoint_saving import CheckpointSaving


class CheckpointMixin(CheckpointSaving):
    """Mixin, placed before the Lightning base: save and load through the `ShardedState` of the run."""

    _own_state: Mapping[str, Any] = MappingProxyType({})
    """The entries for this package in the checkpoint that was loaded last. They are removed before hooks see it."""
    _restores_after_setup: bool | None = None
    """The value of `restore_checkpoint_after_setup`, fixed from `setup` to `teardown`."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint at `checkpoint_path`, verified. Tensors are read when they are used. *Collective*.

        Raises:
            CheckpointError: it is missing or damaged, has untrusted code, or has no optimizer state to resume from.
        """
        from lightning_paral.checkpoint.load import load

        if self._has_users_checkpoint_io:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            self._own_state = checkpoint.pop(PACKAGE_STATE_KEY, {})
            return checkpoint
        ranks = all_ranks()
        if weights_only is None:
            weights_only = self._checkpoint_options.weights_only
        checkpoint = load(ranks.gather(without_scheme(checkpoint_path))[0], ranks, weights_only=weights_only)
        if self.precision_plugin.precision == "16-mixed":
            add_loss_scale_of_plugin(checkpoint, type(self.precision_plugin).__qualname__)
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
        """Load the weights into the module. Each rank reads only its shards."""
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
        """End the run; see `CheckpointSaving.teardown`.

        Raises:
            CheckpointError: a background save failed.
        """
        self._restores_after_setup = None
        super().teardown()
