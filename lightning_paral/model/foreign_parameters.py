"""Reject optimizers that hold tensors other than the module's parameters: the gradients of those are not averaged."""

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.errors import ConfigurationError


def check_optimizer_parameters(optimizers: Iterable[Optimizer], module: Module) -> None:
    """Check that the optimizers hold only parameters of `module`.

    Each rank would update any other tensor, such as a buffer that requires a gradient, with its local gradient.

    Raises:
        ConfigurationError: an optimizer holds another tensor that requires a gradient.
    """
    averaged = set(module.parameters())
    buffers = {buffer: name for name, buffer in module.named_buffers()}
    for optimizer in optimizers:
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for tensor in held:
            if tensor.requires_grad and tensor not in averaged:
                what = (
                    f"the buffer {buffers[tensor]}. Register it as an nn.Parameter"
                    if tensor in buffers
                    else f"{_describe(tensor)} that is not a parameter of {type(module).__name__}. Register the "
                    "parameter, or the module that holds it, there (as an attribute or in an nn.ModuleList, not in a "
                    "list)"
                )
                raise ConfigurationError(
                    f"{type(optimizer).__name__} trains {what}. Only gradients of registered parameters are averaged "
                    "over the ranks, so each rank would compute a different value."
                )


def _describe(tensor: Tensor) -> str:
    return f"a {type(tensor).__name__} of shape {list(tensor.shape)}"
