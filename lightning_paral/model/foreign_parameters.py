"""Reject tensors in optimizers that are no parameters of the module: nothing averages their gradients."""

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.errors import ConfigurationError


def check_optimizer_parameters(optimizers: Iterable[Optimizer], module: Module) -> None:
    """Check that the optimizers hold parameters of `module` only.

    Each rank would update any other tensor, such as a buffer that requires a gradient, by its own gradient.

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
                    else f"{_kind(tensor)} that is no parameter of {type(module).__name__}. Register it there, or the "
                    "module that it belongs to (as an attribute or in an nn.ModuleList, not in a list)"
                )
                raise ConfigurationError(
                    f"{type(optimizer).__name__} trains {what}. The ranks average gradients of registered parameters "
                    "only, so each rank would train its own value."
                )


def _kind(tensor: Tensor) -> str:
    return f"a {type(tensor).__name__} of shape {list(tensor.shape)}"
