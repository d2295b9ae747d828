"""Private state and methods of Lightning's weight-averaging callbacks."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_AVERAGES = tuple(
    PrivateName(
        name=f"lightning.pytorch.callbacks.{kind}._average_model",
        on_instances=True,
        purpose="to average shards in place of a copy of the module",
        reason="the callbacks make the copy themselves and accept no other",
        seen=_SEEN,
    )
    for kind in ("WeightAveraging", "StochasticWeightAveraging")
)
NAMES = (
    *_AVERAGES,
    *(
        PrivateName(
            name=f"lightning.pytorch.callbacks.WeightAveraging.{method}",
            parameters=("self", "pl_module"),
            purpose="to exchange averages and weights shard by shard, and buffers between ranks",
            reason="the callback exchanges them in the middle of its hooks",
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
            purpose="to remove schedulers that a checkpoint replaces, if it is loaded after on_fit_start",
            reason="the callback expects its state before on_fit_start, when modules are not sharded yet",
            seen=_SEEN,
        )
        for attribute in ("_model_contains_batch_norm", "_scheduler_state")
    ),
    PrivateName(
        name="lightning.pytorch.callbacks.StochasticWeightAveraging._clear_schedulers",
        parameters=("trainer",),
        purpose="to remove schedulers that a checkpoint replaces, if it is loaded after on_fit_start",
        reason="the callback expects its state before on_fit_start, when modules are not sharded yet",
        seen=_SEEN,
    ),
)

SWAP, COPY = "_swap_models", "_copy_average_to_current"
"""Methods of `WeightAveraging`: swap averages and weights; copy the averages to the weights."""


def swap_method() -> Callable[[WeightAveraging, LightningModule], None]:
    """Return the method `SWAP` as it is now."""
    return WeightAveraging._swap_models


def copy_method() -> Callable[[WeightAveraging, LightningModule], None]:
    """Return the method `COPY` as it is now."""
    return WeightAveraging._copy_average_to_current


def averages_of(callback: Any) -> Any:
    """Return the module copy in which `callback` keeps averages, or what replaces it."""
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
    """Replace schedulers as `on_fit_start` does, if the callback's state is loaded after that hook."""
    is_late = callback._model_contains_batch_norm is not None  # `on_fit_start` has been called
    if is_late and callback._scheduler_state is not None:
        callback._clear_schedulers(trainer)
