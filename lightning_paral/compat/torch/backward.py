"""The end of a backward pass."""

from collections.abc import Callable

from torch.autograd import Variable

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.autograd.Variable._execution_engine",
        purpose="to run a callback when a backward pass ends",
        reason="torch has public hooks for gradients and nodes, not for the end of the pass; DDP and FSDP use this",
        seen="torch 2.11 to 2.13",
    ),
)


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass. Call this from one of its hooks."""
    Variable._execution_engine.queue_callback(callback)
