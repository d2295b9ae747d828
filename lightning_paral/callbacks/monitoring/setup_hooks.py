"""Call a function between the hooks `setup` and the wrapping of the module, where callbacks have no hook."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method


def call_after_setup_hooks(trainer: Trainer, function: Callable[[], None], undo: ExitStack) -> None:
    """Call `function` on this rank when the ranks have left the barrier after the hooks `setup`.

    Args:
        trainer: the Trainer, in its hooks `setup`.
        function: what to call.
        undo: a stack; nothing is called after it is closed.
    """
    barrier = trainer.strategy.barrier

    def then_call(*args: Any, **kwargs: Any) -> None:
        barrier(*args, **kwargs)
        if (*args, *kwargs.values()) == ("post_setup",):
            function()

    shadow_method(trainer.strategy, "barrier", then_call, undo)
