"""What Lightning's averaging callbacks keep to themselves."""

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
        purpose="to keep averages of shards in place of a copy of the module",
        reason="the callbacks make the copy themselves and take no other",
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
            reason="the callback does it in the middle of its hooks",
            seen=_SEEN,
        )
        for method in ("_swap_models", "_copy_average_to_current")
    ),
    *(
        PrivateName(
            name=f"lightning.pytorch.callbacks.WeightAveraging.{attribute}",
            on_instances=True,
            purpose="to make averages of shards with the options that the callback was given",
            reason="the callback does not tell its options",
            seen=_SEEN,
        )
        for attribute in ("_device", "_use_buffers", "_kwargs")
    ),
    PrivateName(
        name="lightning.pytorch.callbacks.StochasticWeightAveraging._avg_fn",
        on_instances=True,
        purpose="to try whether the averaging function is elementwise",
        reason="the callback does not tell its options",
        seen=_SEEN,
    ),
    *(
        PrivateName(
            name=f"lightning.pytorch.callbacks.StochasticWeightAveraging.{attribute}",
            on_instances=True,
            purpose="to give up schedulers that a checkpoint replaces, where it is loaded after on_fit_start",
            reason="the callback expects its state before on_fit_start, where modules are not divided yet",
            seen=_SEEN,
        )
        for attribute in ("_model_contains_batch_norm", "_scheduler_state")
    ),
    PrivateName(
        name="lightning.pytorch.callbacks.StochasticWeightAveraging._clear_schedulers",
        parameters=("trainer",),
        purpose="to give up schedulers that a checkpoint replaces, where it is loaded after on_fit_start",
        reason="the callback expects its state before on_fit_start, where modules are not divided yet",
        seen=_SEEN,
    ),
)

SWAP, COPY = "_swap_models", "_copy_average_to_current"
"""Methods of `WeightAveraging`: exchange averages and weights, and make the averages the weights."""


def swap_method() -> Callable[[WeightAveraging, LightningModule], None]:
    """Return the method `SWAP` as it is now."""
    return WeightAveraging._swap_models


def copy_method() -> Callable[[WeightAveraging, LightningModule], None]:
    """Return the method `COPY` as it is now."""
    return WeightAveraging._copy_average_to_current


def averages_of(callback: Any) -> Any:
    """Return the copy of the module in which `callback` keeps averages, or what has taken its place."""
    return callback._average_model


def set_averages(callback: Any, averages: Any) -> None:
    """Let `callback` keep its averages in `averages`."""
    _AVERAGES[isinstance(callback, StochasticWeightAveraging)].replace_on(callback, averages)


def options_of(callback: WeightAveraging) -> dict[str, Any]:
    """Return what `callback` gives `AveragedModel`: device, whether buffers are averaged, and what users pass on."""
    return {"device": callback._device, "use_buffers": callback._use_buffers} | callback._kwargs


def passed_on(callback: WeightAveraging) -> dict[str, Any]:
    """Return the options that users pass on to `AveragedModel`."""
    return callback._kwargs


def averaging_function_of(callback: StochasticWeightAveraging) -> Callable[..., Any]:
    """Return the function that averages."""
    function: Callable[..., Any] = callback._avg_fn
    return function


def replace_schedulers_late(callback: StochasticWeightAveraging, trainer: Trainer) -> None:
    """Do what `on_fit_start` does with a state that is loaded before it, if the state comes after it."""
    is_late = callback._model_contains_batch_norm is not None  # `on_fit_start` has been called
    if is_late and callback._scheduler_state is not None:
        callback._clear_schedulers(trainer)
