"""Replace the tensors of a module by tensors without memory."""

from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_paral.compat.torch.modules import own_buffers, own_parameters
from lightning_paral.errors import ConfigurationError


def check_not_lazy(module: LightningModule) -> None:
    """Raise a `ConfigurationError` if parameters get their shapes only in the first forward pass."""
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigurationError(
            f"The shape of {lazy[0]} is not known before the first forward pass, so its memory cannot be planned. Give "
            "the layer its number of inputs, for example nn.Linear in place of nn.LazyLinear."
        )


def become_fake(module: Module, mode: Any, dtype: torch.dtype | None) -> None:
    """Replace the parameters, buffers and tensor attributes of `module` by fake ones; tied ones stay tied.

    Args:
        module: the module.
        mode: the mode in which fake tensors are created.
        dtype: the dtype of parameters and buffers with floating-point values; `None` keeps theirs.
    """
    memo: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            converted = fake_of(tensor.detach(), mode, dtype)
            memo[id(tensor)] = _as_parameter(converted, tensor) if isinstance(tensor, Parameter) else converted
        return memo[id(tensor)]

    kept = []  # so that no id is used twice
    for part in module.modules():
        own: tuple[dict[str, Any], ...] = (own_parameters(part), own_buffers(part))
        for tensors in own:
            for name, tensor in tensors.items():
                if tensor is not None:
                    kept.append(tensor)
                    tensors[name] = fake(tensor)
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                kept.append(value)
                vars(part)[name] = fake(value)


def _as_parameter(tensor: Tensor, parameter: Parameter) -> Parameter:
    fake = Parameter(tensor, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        with suppress(AttributeError):
            setattr(fake, name, value)
    return fake


def fake_of(tensor: Tensor, mode: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake tensor on the CPU with the same shape and strides, and for floating-point values with `dtype`."""
    with mode:
        if tensor.layout is not torch.strided:
            return mode.from_tensor(tensor)  # type: ignore[no-any-return]
        kept = dtype is None or not tensor.is_floating_point()
        kind = tensor.dtype if kept else dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
