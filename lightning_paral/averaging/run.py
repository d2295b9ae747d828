"""Make Lightning's averaging callbacks, and their subclasses, average shards of the weights during one run."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_paral.averaging.averages import ShardedAverages
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.tree import CURRENT_KEY
from lightning_paral.compat.lightning.callbacks import (
    COPY,
    SWAP,
    averages_of,
    options_of,
    set_averages,
)
from lightning_paral.compat.lightning.methods import replace_methods
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import RankZeroBuffers

LoadWeights = Callable[[Mapping[str, Any], bool], None]
"""`Strategy.load_model_state_dict`. Takes a checkpoint, and whether its keys must match the module exactly."""
_FULL_WEIGHT_METHODS = {
    WeightAveraging: (SWAP, COPY),
    StochasticWeightAveraging: ("update_parameters", "transfer_weights"),
}
"""Methods that subclasses must not override, because they use full weights."""


class RunAverages:
    """The averages of weights that callbacks keep during one run of a strategy that shards the weights.

    Lightning's callbacks copy the module before it is sharded, and their methods use full parameters. During the run,
    methods of both classes are replaced by ones that use `ShardedAverages`. The averaging function must be elementwise.

    The strategy creates it before callbacks are set up, and calls `attach` once the module is sharded, `load` whenever
    it loads a checkpoint, and `end` in its teardown.

    Args:
        trainer: the trainer whose callbacks may average weights.
        save_frozen: whether checkpoints include frozen parameters.
        obstacle: why this strategy cannot average weights; `None` if it can.

    Raises:
        ConfigurationError: weights cannot be averaged, or a subclass overrides a method that has to be replaced.
    """

    def __init__(self, trainer: Trainer, *, save_frozen: bool, obstacle: str | None) -> None:
        self._trainer, self._save_frozen = trainer, save_frozen
        found: list[Any] = vars(trainer)["callbacks"]
        self._callbacks = [each for each in found if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
        self._pending: tuple[Mapping[str, Any], bool] | None = None
        self._is_loading_weights = False
        self._undo = ExitStack()
        if not self._callbacks:
            return
        if trainer.state.fn != TrainerFn.FITTING:
            self._callbacks = []  # nothing is averaged, but `StochasticWeightAveraging.setup` would copy the weights
        elif obstacle is not None:
            raise ConfigurationError(f"{type(self._callbacks[0]).__name__} cannot be used here: {obstacle}")
        for callback in self._callbacks:
            _check(callback)
        self._undo.callback(replace_methods(WeightAveraging, self._weight_averaging_methods()))
        self._undo.callback(replace_methods(StochasticWeightAveraging, self._swa_methods()))

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
        if self._callbacks:
            shards = make_shards()
        for callback in self._callbacks:
            averages = averages_of(callback)
            if not isinstance(averages, ShardedAverages):
                raise ConfigurationError(
                    f"{type(callback).__name__} copies the full module in its own setup, but ranks hold shards of it. "
                    "Call super().setup(trainer, pl_module, stage) there, or use paral_ddp."
                )
            averages.attach(shards, buffers)
        pending, self._pending = self._pending, None
        if pending is not None:
            self.load(*pending, load_weights)

    def load(self, checkpoint: Mapping[str, Any], strict: bool, load_weights: LoadWeights) -> None:
        """Set the averages to the module's weights, into which the `state_dict` of `checkpoint` has just been loaded.

        If that entry holds averages, the checkpoint holds the weights under another key: load these afterwards. A call
        before `attach` is postponed until `attach`.
        """
        found: list[Any] = [averages_of(each) for each in self._callbacks if isinstance(each, WeightAveraging)]
        in_state_dict = [averages for averages in found if isinstance(averages, ShardedAverages)]
        if self._is_loading_weights or not in_state_dict:
            return
        if not all(averages.has_shards for averages in in_state_dict):
            self._pending = checkpoint, strict
            return
        for averages in in_state_dict:
            averages.take_current()
        if CURRENT_KEY in checkpoint:
            self._is_loading_weights = True
            try:
                load_weights({**checkpoint, "state_dict": checkpoint[CURRENT_KEY]}, strict)
            finally:
                self._is_loading_weights = False

    def end(self) -> None:
        """Restore Lightning's classes. Averages that have not become the module's weights are lost."""
        self._undo.close()
        for callback in self._callbacks:
            averages = averages_of(callback)
            if isinstance(averages, ShardedAverages) and averages.has_shards:
                averages.end()
                if averages.is_lost and isinstance(callback, WeightAveraging):
                    rank_zero_warn(
                        f"The fit ended before the averages of {type(callback).__name__} became the weights of the "
                        "module. They were sharded and are lost; checkpoints of the fit contain them."
                    )
                    set_averages(callback, None)
        self._callbacks = []

    def _setup(self, theirs: Callable[..., None]) -> Callable[..., None]:
        """Return a `setup` that makes sharded averages in place of a copy of the module."""

        def setup(callback: Any, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer is not self._trainer:
                theirs(callback, trainer, pl_module, stage)
            elif stage == "fit":
                # Like Lightning's copy, the averages of SWA move to the callback's device at the first update.
                options = options_of(callback) if isinstance(callback, WeightAveraging) else {"prefix": ""}
                set_averages(callback, ShardedAverages(pl_module, self._save_frozen, **options))

        return setup

    def _weight_averaging_methods(self) -> dict[str, Any]:
        theirs = WeightAveraging
        save = theirs.on_save_checkpoint

        def swap_models(callback: Any, pl_module: LightningModule) -> None:
            averages: ShardedAverages = averages_of(callback)
            if averages.has_shards:  # otherwise the averages are the weights
                averages.swap()

        def copy_average_to_current(callback: Any, pl_module: LightningModule) -> None:
            averages_of(callback).become_weights(buffers=True)

        def on_save_checkpoint(callback: Any, trainer: Trainer, module: LightningModule, checkpoint: Any) -> None:
            checkpoint["state_dict"] = averages_of(callback).weights_to_save(checkpoint["state_dict"])
            save(callback, trainer, module, checkpoint)

        def on_load_checkpoint(callback: Any, trainer: Trainer, module: LightningModule, checkpoint: Any) -> None:
            # The strategy sets the averages to the loaded weights when it loads the weights of the module.
            if CURRENT_KEY in checkpoint and "averaging_state" in checkpoint:
                rank_zero_info("Found current_model_state in the checkpoint. This is used to initialize the model.")
                averages_of(callback).n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
            else:
                rank_zero_warn(
                    "The checkpoint was not created with WeightAveraging. Both the current and the average model are "
                    "initialized with its state_dict."
                )

        return {
            "setup": self._setup(theirs.setup),
            SWAP: _if_sharded(swap_models, getattr(theirs, SWAP)),
            COPY: _if_sharded(copy_average_to_current, getattr(theirs, COPY)),
            "on_save_checkpoint": _if_sharded(on_save_checkpoint, save),
            "on_load_checkpoint": _if_sharded(on_load_checkpoint, theirs.on_load_checkpoint),
        }

    def _swa_methods(self) -> dict[str, Any]:
        theirs = StochasticWeightAveraging
        update, load = theirs.update_parameters, theirs.load_state_dict

        @torch.no_grad()
        def update_parameters(averages: ShardedAverages, model: Any, *args: Any) -> None:
            update(averages, averages.current_view(), *args)  # type: ignore[arg-type]

        def transfer_weights(averages: ShardedAverages, pl_module: LightningModule) -> None:
            averages.become_weights(buffers=False)

        def load_state_dict(callback: Any, state_dict: dict[str, Any]) -> None:
            # Its `on_fit_start`, which has run, would have replaced the schedulers.
            if state_dict["scheduler_state"] is not None and self._trainer.strategy.restore_checkpoint_after_setup:
                raise ConfigurationError(
                    "StochasticWeightAveraging cannot resume after swa_epoch_start if the module is built in "
                    "configure_model, or under ZeRO with 16-bit weights, because schedulers are restored before it. "
                    "Build the module in __init__, train with paral_fsdp, or resume from an earlier checkpoint."
                )
            load(callback, state_dict)

        return {
            "setup": self._setup(theirs.setup),
            "update_parameters": staticmethod(_if_sharded(update_parameters, update)),
            "transfer_weights": staticmethod(_if_sharded(transfer_weights, theirs.transfer_weights)),
            "load_state_dict": _if_sharded(load_state_dict, load),
        }


def _if_sharded(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `ours` if its first argument is, or is a callback that keeps, `ShardedAverages`."""

    @wraps(theirs)
    def method(first: Any, *args: Any, **keywords: Any) -> None:
        averages = averages_of(first) if isinstance(first, Callback) else first
        (ours if isinstance(averages, ShardedAverages) else theirs)(first, *args, **keywords)

    return method


def _check(callback: Any) -> None:
    """Raise a `ConfigurationError` if a callback needs full weights."""
    name = type(callback).__name__
    for base, methods in _FULL_WEIGHT_METHODS.items():
        for method in methods if isinstance(callback, base) else ():
            if getattr(type(callback), method) is not getattr(base, method):
                raise ConfigurationError(
                    f"{name} overrides {method}. That method needs full weights, but ranks hold shards of them. Remove "
                    "the override, or use paral_ddp."
                )


def forget_ended(callbacks: list[Any]) -> None:
    """Drop averages of a finished fit, so that evaluating a checkpoint uses the averages in its `state_dict`."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and isinstance(averages_of(callback), ShardedAverages):
            set_averages(callback, None)


def broadcast_when_swapped(buffers: RankZeroBuffers) -> Callable[[], None]:
    """Make `WeightAveraging` broadcast its averages of `buffers` at each swap; return a function that undoes this.

    For strategies whose ranks hold full weights, which Lightning averages itself.
    """
    swap = getattr(WeightAveraging, SWAP)

    def swap_models(callback: Any, pl_module: LightningModule) -> None:
        buffers.broadcast_averages(averages_of(callback).module)
        swap(callback, pl_module)

    return replace_methods(WeightAveraging, {SWAP: swap_models})
