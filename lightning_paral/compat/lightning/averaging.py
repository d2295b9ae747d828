"""Private state and methods of Lightning's weight-averaging callbacks."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_LATE = (
    "the callback removes them only in on_fit_start, and strategies that shard modules load its state after that hook"
)
_AVERAGES = tuple(
    PrivateName(
        name=f"lightning.pytorch.callbacks.{cls}._average_model",
        on_instances=True,
        purpose="to average shards instead of a full copy of the module",
        reason="the callbacks create the copy themselves, and have no option to replace it",
        seen=_SEEN,
    )
    for cls in ("WeightAveraging", "StochasticWeightAveraging")
)
NAMES = (
    *_AVERAGES,
    *(
        PrivateName(
            name=f"lightning.pytorch.callbacks.WeightAveraging.{method}",
            parameters=("self", "pl_module"),
            purpose="to exchange averages and weights shard by shard, and to broadcast buffers",
            reason="the callback calls these methods inside its hooks, and no public hook runs there",
            seen=_SEEN,
        )
        for method in ("_swap_models", "_copy_average_to_current")
    ),
    *(
        PrivateName(
            name=f"lightning.pytorch.callbacks.WeightAveraging.{attribute}",
            on_instances=True,
            purpose="to average shards with the options given to the callback",
            reason="the callback has no public attributes for its options",
            seen=_SEEN,
        )
        for attribute in ("_device", "_use_buffers", "_kwargs")
    ),
    PrivateName(
        name="lightning.pytorch.callbacks.StochasticWeightAveraging._avg_fn",
        on_instances=True,
        purpose="to test whether the averaging function is elementwise",
        reason="the callback has no public attributes for its options",
        seen=_SEEN,
    ),
    *(
        PrivateName(
            name=f"lightning.pytorch.callbacks.StochasticWeightAveraging.{attribute}",
            on_instances=True,
            purpose="to remove the schedulers that a loaded checkpoint replaces",
            reason=_LATE,
            seen=_SEEN,
        )
        for attribute in ("_model_contains_batch_norm", "_scheduler_state")
    ),
    PrivateName(
        name="lightning.pytorch.callbacks.StochasticWeightAveraging._clear_schedulers",
        parameters=("trainer",),
        purpose="to remove the schedulers that a loaded checkpoint replaces",
        reason=_LATE,
        seen=_SEEN,
    ),
)

SWAP, COPY = "_swap_models", "_copy_average_to_current"
"""Names of methods of `WeightAveraging`: one swaps averages and weights, one copies the averages to the weights."""


def swap_method() -> Callable[[WeightAveraging, LightningModule], None]:
    """Return the current method `SWAP`."""
    return WeightAveraging._swap_models


def copy_method() -> Callable[[WeightAveraging, LightningModule], None]:
    """Return the current method `COPY`."""
    return WeightAveraging._copy_average_to_current


def averages_of(callback: Any) -> Any:
    """Return the copy of the module in which `callback` keeps its averages, or the object set in its place."""
    return callback._average_model


def set_averages(callback: Any, averages: Any) -> None:
    """Make `callback` keep its averages in `averages`."""
    _AVERAGES[isinstance(callback, StochasticWeightAveraging)].replace_on(callback, averages)


def options_of(callback: WeightAveraging) -> dict[str, Any]:
    """Return the options that `callback` passes to `AveragedModel`: `device`, `use_buffers`, and the user's."""
    return {"device": callback._device, "use_buffers": callback._use_buffers} | callback._kwargs


def user_options_of(callback: WeightAveraging) -> dict[str, Any]:
    """Return the user's options for `AveragedModel`."""
    return callback._kwargs


def averaging_function_of(callback: StochasticWeightAveraging) -> Callable[..., Any]:
    """Return the averaging function of `callback`."""
    function: Callable[..., Any] = callback._avg_fn
    return function


def replace_schedulers_late(callback: StochasticWeightAveraging, trainer: Trainer) -> None:
    """Remove schedulers as `on_fit_start` does, if that hook ran before the callback's state was loaded."""
    is_late = callback._model_contains_batch_norm is not None  # `on_fit_start` has been called
    if is_late and callback._scheduler_state is not None:
        callback._clear_schedulers(trainer)
