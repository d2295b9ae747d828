"""Make Lightning's averaging callbacks, and their subclasses, average shards of the weights."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_paral.averaging.averages import ShardedAverages, ShardedSWAAverages
from lightning_paral.averaging.elementwise import check_elementwise
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.compat.lightning.callbacks import (
    COPY,
    SWAP,
    averages_of,
    averaging_function_of,
    copy_method,
    options_of,
    replace_schedulers_late,
    set_averages,
    swap_method,
    user_options_of,
)
from lightning_paral.compat.lightning.methods import replace_methods
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import RankZeroBuffers

_FULL_WEIGHT_METHODS = {
    WeightAveraging: (SWAP, COPY),
    StochasticWeightAveraging: ("update_parameters", "transfer_weights"),
}
"""Methods that subclasses must not override, because they use full weights."""


class AveragingCallbacks:
    """Adapts the callbacks that average weights, from before their `setup` until the run ends.

    Lightning's `setup` copies the module before it is sharded, and its other methods use full parameters. Until the
    fit ends, these methods of both callback classes are replaced. The replacements use `ShardedAverages`, not a copy.

    Args:
        trainer: the trainer whose callbacks are adapted.
        save_frozen: whether checkpoints hold frozen parameters.
        obstacle: why this strategy cannot average weights; `None` if it can.

    Raises:
        ConfigurationError: weights cannot be averaged, an averaging function is not elementwise, or a subclass
            overrides a method that has to be replaced.
    """

    def __init__(self, trainer: Trainer, *, save_frozen: bool, obstacle: str | None) -> None:
        found: list[Any] = vars(trainer)["callbacks"]
        self._callbacks = [each for each in found if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
        self._trainer = trainer
        self._save_frozen = save_frozen
        self._undo = ExitStack()
        if not self._callbacks:
            return
        if trainer.state.fn != TrainerFn.FITTING:
            # Nothing is averaged, but `StochasticWeightAveraging.setup` would copy the weights, or refuse the strategy.
            self._callbacks = []
            self._undo.callback(replace_methods(StochasticWeightAveraging, self._swa_methods()))
            swaps = {SWAP: self._weight_averaging_methods()[SWAP]}
            self._undo.callback(replace_methods(WeightAveraging, swaps))
            return
        if obstacle is not None:
            raise ConfigurationError(f"{type(self._callbacks[0]).__name__} cannot be used here: {obstacle}")
        for callback in self._callbacks:
            _check_callback(callback)
        self._undo.callback(replace_methods(WeightAveraging, self._weight_averaging_methods()))
        self._undo.callback(replace_methods(StochasticWeightAveraging, self._swa_methods()))

    def attach(self, make_shards: Callable[[], WeightShards], buffers: RankZeroBuffers | None) -> None:
        """Start averaging. Call it once the module is sharded. *Collective* if there are averaging callbacks.

        Raises:
            ConfigurationError: a callback keeps a full copy of the module.
        """
        if not self._callbacks:
            return
        shards = make_shards()
        for callback in self._callbacks:
            averages = averages_of(callback)
            if not isinstance(averages, ShardedAverages):
                raise ConfigurationError(
                    f"{type(callback).__name__} copies the full module in its own setup, but ranks hold shards of it. "
                    "Call super().setup(trainer, pl_module, stage) there, or use paral_ddp."
                )
            averages.attach(shards, buffers)

    @property
    def are_in_state_dict(self) -> bool:
        """Whether checkpoints hold averages in `state_dict`, and the weights under another key."""
        return bool(self._weight_averages)

    @property
    def have_shards(self) -> bool:
        """Whether `attach` has given the averages their shards."""
        return all(averages.has_shards for averages in self._weight_averages)

    def take_current(self) -> None:
        """Set the averages that checkpoints hold in `state_dict` to the current weights."""
        for averages in self._weight_averages:
            averages.take_current()

    @property
    def _weight_averages(self) -> list[ShardedAverages]:
        found: list[Any] = [averages_of(each) for each in self._callbacks if isinstance(each, WeightAveraging)]
        return [averages for averages in found if isinstance(averages, ShardedAverages)]

    def end(self) -> None:
        """Restore Lightning's classes. Averages that have not become the module's weights are lost."""
        self._undo.close()
        for callback in self._callbacks:
            averages = averages_of(callback)
            if isinstance(averages, ShardedAverages) and averages.has_shards:
                averages.end()
                if averages.was_lost and isinstance(callback, WeightAveraging):
                    rank_zero_warn(
                        f"The fit ended before the averages of {type(callback).__name__} became the weights of the "
                        "module. They were sharded and are lost; checkpoints of the fit contain them."
                    )
                    set_averages(callback, None)
        self._callbacks = []

    def _is_own_trainer(self, trainer: Trainer) -> bool:
        return trainer is self._trainer

    def _weight_averaging_methods(self) -> dict[str, Any]:
        theirs = WeightAveraging
        set_up, swap, copy, save, load = (
            theirs.setup, swap_method(), copy_method(), theirs.on_save_checkpoint, theirs.on_load_checkpoint,
        )  # fmt: skip

        def setup(callback: Any, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if not self._is_own_trainer(trainer):
                set_up(callback, trainer, pl_module, stage)
            elif stage == "fit":
                set_averages(callback, ShardedAverages(pl_module, self._save_frozen, **options_of(callback)))

        def swap_models(callback: Any, pl_module: LightningModule) -> None:
            averages = averages_of(callback)
            if not isinstance(averages, ShardedAverages):
                swap(callback, pl_module)
            elif averages.has_shards:  # otherwise the averages are the weights
                averages.swap()

        def copy_average_to_current(callback: Any, pl_module: LightningModule) -> None:
            averages = averages_of(callback)
            if isinstance(averages, ShardedAverages):
                averages.become_weights(buffers=True)
            else:
                copy(callback, pl_module)

        def on_save_checkpoint(callback: Any, trainer: Trainer, module: LightningModule, checkpoint: Any) -> None:
            averages = averages_of(callback)
            if isinstance(averages, ShardedAverages):
                checkpoint["state_dict"] = averages.weights_to_save(checkpoint["state_dict"])
            save(callback, trainer, module, checkpoint)

        def on_load_checkpoint(callback: Any, trainer: Trainer, module: LightningModule, checkpoint: Any) -> None:
            # The strategy sets the averages to the loaded weights when it loads the weights of the module.
            averages = averages_of(callback)
            if not isinstance(averages, ShardedAverages):
                load(callback, trainer, module, checkpoint)
            elif "current_model_state" in checkpoint and "averaging_state" in checkpoint:
                rank_zero_info("Found current_model_state in the checkpoint. This is used to initialize the model.")
                averages.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
            else:
                rank_zero_warn(
                    "The checkpoint was not created with WeightAveraging. Both the current and the average model are "
                    "initialized with its state_dict."
                )

        return {
            "setup": setup,
            SWAP: swap_models,
            COPY: copy_average_to_current,
            "on_save_checkpoint": on_save_checkpoint,
            "on_load_checkpoint": on_load_checkpoint,
        }

    def _swa_methods(self) -> dict[str, Any]:
        theirs = StochasticWeightAveraging
        set_up, update, transfer, load = (
            theirs.setup, theirs.update_parameters, theirs.transfer_weights, theirs.load_state_dict,
        )  # fmt: skip

        def setup(callback: Any, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if not self._is_own_trainer(trainer):
                set_up(callback, trainer, pl_module, stage)
            elif stage == "fit":
                # Like Lightning's copy, the averages move to the callback's device at the first update.
                set_averages(callback, ShardedSWAAverages(pl_module, self._save_frozen))

        def update_parameters(average_model: Any, model: Any, n_averaged: Tensor, avg_fn: Any) -> None:
            if isinstance(average_model, ShardedAverages):
                with torch.no_grad():
                    update(average_model, average_model.current_view(), n_averaged, avg_fn)  # type: ignore[arg-type]
            else:
                update(average_model, model, n_averaged, avg_fn)

        def transfer_weights(src_pl_module: Any, dst_pl_module: LightningModule) -> None:
            if isinstance(src_pl_module, ShardedAverages):
                src_pl_module.become_weights(buffers=False)
            else:
                transfer(src_pl_module, dst_pl_module)

        def load_state_dict(callback: Any, state_dict: dict[str, Any]) -> None:
            load(callback, state_dict)
            if isinstance(averages_of(callback), ShardedAverages):
                replace_schedulers_late(callback, self._trainer)

        return {
            "setup": setup,
            "update_parameters": staticmethod(update_parameters),
            "transfer_weights": staticmethod(transfer_weights),
            "load_state_dict": load_state_dict,
        }


def forget_ended(callbacks: list[Any]) -> None:
    """Drop averages of a finished fit, so that evaluating a checkpoint uses the averages in its `state_dict`."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and isinstance(averages_of(callback), ShardedAverages):
            set_averages(callback, None)


def _check_callback(callback: Any) -> None:
    cls = type(callback)
    for base, names in _FULL_WEIGHT_METHODS.items():
        for name in names if isinstance(callback, base) else ():
            if getattr(cls, name) is not getattr(base, name):
                raise ConfigurationError(
                    f"{cls.__name__} overrides {name}. That method needs full weights, but ranks hold shards of "
                    "them. Remove the override, or use paral_ddp."
                )
    if isinstance(callback, StochasticWeightAveraging):
        check_elementwise(f"avg_fn of {cls.__name__}", averaging_function_of(callback), multi=False)
        return
    options = user_options_of(callback)
    unknown = sorted(options.keys() - {"avg_fn", "multi_avg_fn"})
    if unknown:
        raise ConfigurationError(
            f"{cls.__name__} passes {', '.join(unknown)} to AveragedModel. Under a strategy that shards weights, it "
            "can pass only avg_fn and multi_avg_fn. Leave out the others, or use paral_ddp."
        )
    for name in ("avg_fn", "multi_avg_fn"):
        if options.get(name) is not None:
            check_elementwise(f"{name} of {cls.__name__}", options[name], multi=name == "multi_avg_fn")
