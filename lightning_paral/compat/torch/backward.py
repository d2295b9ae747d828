"""Callbacks at the end of a backward pass."""

from collections.abc import Callable

from torch.autograd import Variable

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.autograd.Variable": {"_execution_engine": "run a callback when a backward pass ends"},
}


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass. Must be called from a hook of that pass."""
    Variable._execution_engine.queue_callback(callback)
