"""What stands for a parameter that only another stage has."""

import sys
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.torch.modules import is_of_load_state_dict
from lightning_paral.errors import ConfigurationError

_DATA: Any = Tensor.data
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_paral")
_OF_TORCH = ("torch.nn.modules.", "torch.nn.parameter", "torch.optim.", "torch.amp.")
"""Modules of torch that skip parameters without a gradient, and compute nothing over all gradients."""
_FINETUNING = "lightning.pytorch.callbacks.finetuning"
_OF_USERS = "lightning.pytorch.utilities.grads"
"""A module of Lightning for user code, whose results are about all parameters that it gets."""


class ElsewhereParameter(FlatShard):
    """A parameter of another stage: it has a shape, but no values and no gradient.

    Optimizers skip it, because its gradient is `None`. Other code that reads gradients would compute with those of one
    stage only, such as a norm, so it gets an error.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell Lightning whether two parameters are the same, which `BaseFinetuning` asks by their values.

        Let `load_state_dict` pass: the stage that has the parameter loads its values.
        """
        if func is torch.ops.aten.copy_.default and is_elsewhere(args[0]) and is_of_load_state_dict(sys._getframe(1)):
            return args[0]
        if func is torch.ops.aten.equal.default and _module_of(_caller(sys._getframe(1))) == _FINETUNING:
            return args[0] is args[1]
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def grad(self) -> Tensor | None:
        """`None` for libraries and optimizers; for other code an error."""
        if is_of_user(sys._getframe(1)):
            raise ConfigurationError(
                f"The gradient of {self.description} was read, but it is on that stage only. On all ranks, "
                "trainer.strategy.full_gradient(parameter) returns whole gradients, and "
                "trainer.strategy.gradient_norm() their norm. Clip with Trainer(gradient_clip_val=...). To change "
                "gradients in another way, train with paral_fsdp."
            )
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ConfigurationError(
                f"The gradient of {self.description} was set, but it is on that stage only. Clip with "
                "Trainer(gradient_clip_val=...). To change gradients in another way, train with paral_fsdp."
            )

    @property
    def data(self) -> Tensor:
        """A tensor of the same shape without values, for libraries; for other code an error."""
        if is_of_user(sys._getframe(1)):
            raise ConfigurationError(
                f"The values of {self.description} were read, but they are on that stage only. On all ranks, "
                "trainer.strategy.full_parameter(parameter) returns whole parameters. To change parameters in hooks, "
                "train with paral_fsdp."
            )
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, FlatShard):
            raise ConfigurationError(
                f"Values were assigned to {self.description}, which has its values on that stage only. To change "
                "parameters in hooks, train with paral_fsdp."
            )
        _DATA.__set__(self, value)


def elsewhere(parameter: Parameter, device: torch.device, description: str) -> Parameter:
    """Return what stands for `parameter`, with its shape, dtype and attributes, and reports `device`.

    Args:
        parameter: the parameter of another stage.
        device: the device of this rank.
        description: names the parameter and its stage in errors.
    """
    shard = FlatShard(parameter.shape, parameter.dtype, 0, 0, _Nothing(parameter.dtype), device=device)
    standing = Parameter(shard, requires_grad=parameter.requires_grad)
    standing.__class__ = ElsewhereParameter  # type: ignore[assignment]
    for name, value in vars(parameter).items():
        vars(standing).setdefault(name, value)
    vars(standing)["description"] = description
    return standing


def is_elsewhere(parameter: Tensor) -> bool:
    """Return whether `parameter` stands for one that only other stages have."""
    return isinstance(parameter, FlatShard)


class _Nothing:
    """Reads the elements of a tensor that this rank has: none. Unlike a lambda, it can be pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self) -> Tensor:
        """Return an empty tensor."""
        return torch.empty(0, dtype=self._dtype)


def is_of_user(frame: FrameType | None) -> bool:
    """Return whether the code of `frame` is neither of a library nor called by the `step` of an optimizer."""
    name = _module_of(frame)
    if (name.partition(".")[0] in _LIBRARIES and name != _OF_USERS) or f"{name}.".startswith(_OF_TORCH):
        return False
    while frame is not None and _module_of(frame).partition(".")[0] not in _LIBRARIES:
        owner = frame.f_locals.get("self")
        is_of_torch = _module_of(frame).startswith("torch.optim.")  # whose wrapper of `step` calls hooks of users
        if isinstance(owner, Optimizer) and not isinstance(owner, LightningOptimizer) and not is_of_torch:
            return False
        frame = frame.f_back
    return True


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame from `frame` on that is neither torch's nor ours, which gathers shards."""
    while frame is not None and _module_of(frame).partition(".")[0] in ("torch", "lightning_paral"):
        frame = frame.f_back
    return frame


def _module_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
