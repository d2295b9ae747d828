"""Measure how long the end of a backward pass waits for other ranks."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch.backward import call_at_end_of_backward


def waits_at_end_of_backward(model: Module | None) -> bool:
    """Return whether the engine of `model` waits for other ranks at the end of the backward pass, and only there.

    This is so under DDP, whose reducer waits there for the gradients of all ranks. Others also wait inside of passes.
    """
    return isinstance(model, DistributedDataParallel)


def forward_waits(model: DistributedDataParallel) -> bool:
    """Return whether a forward pass may wait for other ranks: for rank 0's buffers."""
    return model.broadcast_buffers and any(True for _ in model.buffers())


def call_before_wait(loss: Tensor, begin_waiting: Callable[[], None]) -> RemovableHandle | None:
    """Call a function in the backward pass of `loss`, after all gradients are computed and before DDP waits for them.

    Callbacks at the end of a backward pass run in the order in which they were registered. The hook of the loss is the
    first of the pass, so its callback precedes that of DDP's reducer.

    Args:
        loss: the tensor from which the backward pass begins.
        begin_waiting: the function.

    Returns:
        RemovableHandle | None: removes the hook, which would also be called if the pass is repeated; `None` if there
            will be no pass.
    """

    def on_first_gradient(_: Tensor) -> None:
        call_at_end_of_backward(begin_waiting)

    handle: RemovableHandle | None = loss.register_hook(on_first_gradient) if loss.requires_grad else None  # type: ignore[no-untyped-call]
    return handle
