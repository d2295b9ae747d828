"""The end of a backward pass."""

from collections.abc import Callable

from torch.autograd import Variable

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.autograd.Variable._execution_engine",
        purpose="to be called when a backward pass ends",
        reason="torch has hooks for gradients and nodes, and none for the end of the pass; DDP and FSDP use this one",
        seen="torch 2.11 to 2.13",
    ),
)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let `callback` be called at the end of the backward pass that is running: call this in one of its hooks."""
    Variable._execution_engine.queue_callback(callback)
