"""Show a text in Lightning's progress bar."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method

ITEM = "paral"


def show_in_progress_bar(trainer: Trainer, text: Callable[[], str], undo: ExitStack) -> None:
    """Add an item to the Trainer's progress bar, if it has one, until `undo` is closed.

    The item does not pass through the metrics of the Trainer, so that callbacks and loggers do not see it.

    Args:
        trainer: the Trainer.
        text: returns the text; the item is left out while the text is empty.
        undo: a stack; closing it removes the item.
    """
    bar: Any = trainer.progress_bar_callback
    if bar is None:
        return
    get_metrics = bar.get_metrics

    def with_text(*args: Any, **kwargs: Any) -> Any:
        metrics = get_metrics(*args, **kwargs)
        shown = text()
        return {**metrics, ITEM: shown} if shown else metrics

    shadow_method(bar, "get_metrics", with_text, undo)
