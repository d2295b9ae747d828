"""Averages of weights during one run: find the callbacks before the module is sharded, then attach its shards."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.averaging.callbacks import AveragingCallbacks
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.tree import CURRENT_KEY
from lightning_paral.model.buffers import RankZeroBuffers

LoadWeights = Callable[[Mapping[str, Any], bool], None]
"""`Strategy.load_model_state_dict`. Takes a checkpoint, and whether its keys must match the module exactly."""


class RunAverages:
    """The averages of weights that callbacks keep during one run of a strategy that shards the weights.

    The strategy creates it before callbacks are set up, and calls `attach` once the module is sharded, `load` whenever
    it loads a checkpoint, and `end` in its teardown.

    Args:
        trainer: the trainer whose callbacks may average weights.
        save_frozen: whether checkpoints include frozen parameters.
        obstacle: why this strategy cannot average weights; `None` if it can.

    Raises:
        ConfigurationError: weights cannot be averaged, or an averaging function is not elementwise.
    """

    def __init__(self, trainer: Trainer, *, save_frozen: bool, obstacle: str | None) -> None:
        self._callbacks = AveragingCallbacks(trainer, save_frozen=save_frozen, obstacle=obstacle)
        self._pending: tuple[Mapping[str, Any], bool] | None = None
        self._is_loading_weights = False

    def attach(
        self, make_shards: Callable[[], WeightShards], buffers: RankZeroBuffers | None, load_weights: LoadWeights
    ) -> None:
        """Start averaging. *Collective* over the world if there are averaging callbacks.

        Args:
            make_shards: returns this rank's shards; called only if there are averaging callbacks.
            buffers: broadcasts rank 0's averages of buffers, as it does rank 0's buffers; `None` if each rank
                keeps its own.
            load_weights: loads the weights of a checkpoint that was loaded before this call.

        Raises:
            ConfigurationError: a callback keeps a full copy of the module.
        """
        self._callbacks.attach(make_shards, buffers)
        pending, self._pending = self._pending, None
        if pending is not None:
            self.load(*pending, load_weights)

    def load(self, checkpoint: Mapping[str, Any], strict: bool, load_weights: LoadWeights) -> None:
        """Set the averages to the module's weights, into which the `state_dict` of `checkpoint` has just been loaded.

        If that entry holds averages, the checkpoint holds the weights under another key: load these afterwards. A call
        before `attach` is postponed until `attach`.
        """
        if self._is_loading_weights or not self._callbacks.are_in_state_dict:
            return
        if not self._callbacks.have_shards:
            self._pending = checkpoint, strict
            return
        self._callbacks.take_current()
        if CURRENT_KEY in checkpoint:
            self._is_loading_weights = True
            try:
                load_weights({**checkpoint, "state_dict": checkpoint[CURRENT_KEY]}, strict)
            finally:
                self._is_loading_weights = False

    def end(self) -> None:
        """Restore Lightning's callbacks. Averages that have not become the module's weights are lost."""
        self._callbacks.end()
