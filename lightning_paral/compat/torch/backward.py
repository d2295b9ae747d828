"""Callbacks at the end of a backward pass."""

from collections.abc import Callable

from torch.autograd import Variable

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.autograd.Variable._execution_engine",
        purpose="to run a callback when a backward pass ends",
        reason="torch's public hooks run for tensors and nodes, not at the end of the pass; DDP and FSDP use this name",
        seen="torch 2.11 to 2.13",
    ),
)


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass. Must be called from a hook of that pass."""
    Variable._execution_engine.queue_callback(callback)
