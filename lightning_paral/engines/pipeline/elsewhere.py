"""What stands for a parameter that only another stage has, and for its optimizer state."""

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.errors import ConfigurationError

_DATA: Any = Tensor.data
_LIBRARIES = (
    *("lightning.", "pytorch_lightning.", "lightning_paral."),
    *("torch.nn.modules.", "torch.nn.parameter.", "torch.optim.", "torch.amp."),
)
"""What may read gradients: it skips parameters without one, and computes nothing over all of them."""
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
        """Say whether two parameters are the same, which `BaseFinetuning` asks by their values.

        Let copies pass, as by `load_state_dict`: the stage that has the parameter makes them.
        """
        if func is torch.ops.aten.equal.default:
            return args[0] is args[1]
        if func is torch.ops.aten.copy_.default and is_elsewhere(args[0]):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def grad(self) -> Tensor | None:
        """`None` for libraries and optimizers; for other code an error."""
        if _is_of_user(sys._getframe(1)):
            refuse(f"The gradient of {self.description} was read, but it is on that stage only.")
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            refuse(f"The gradient of {self.description} was set, but it is on that stage only.")

    @property
    def data(self) -> Tensor:
        """A tensor of the same shape without values, for libraries; for other code an error."""
        if _is_of_user(sys._getframe(1)):
            refuse(f"The values of {self.description} were read, but they are on that stage only.")
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, FlatShard):
            refuse(f"Values were assigned to {self.description}, which has its values on that stage only.")
        _DATA.__set__(self, value)


def elsewhere(parameter: Parameter, device: torch.device, description: str) -> Parameter:
    """Return what stands for `parameter`, with its shape, dtype and attributes, and reports `device`.

    Args:
        parameter: the parameter of another stage.
        device: the device of this rank.
        description: names the parameter and its stage in errors.
    """
    nothing = partial(torch.empty, 0, dtype=parameter.dtype)  # unlike a lambda, it can be pickled
    shard = FlatShard(parameter.shape, parameter.dtype, 0, 0, nothing, device=device)
    standing = Parameter(shard, requires_grad=parameter.requires_grad)
    standing.__class__ = ElsewhereParameter  # type: ignore[assignment]
    for name, value in vars(parameter).items():
        vars(standing).setdefault(name, value)
    vars(standing)["description"] = description
    return standing


def is_elsewhere(parameter: Tensor) -> bool:
    """Return whether `parameter` stands for one that only other stages have."""
    return isinstance(parameter, FlatShard)


class StageOptimizerState(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer: the states on this stage. Reading those of other stages is an error."""

    def __missing__(self, parameter: Any) -> Any:
        """Return a new state, or what stands for the state of a parameter of another stage."""
        if isinstance(parameter, Tensor) and is_elsewhere(parameter):
            return _StateElsewhere(description=vars(parameter)["description"])
        return super().__missing__(parameter)


class _StateElsewhere(dict[str, Any]):
    def __missing__(self, key: str) -> NoReturn:
        refuse(f"The optimizer's state of {self['description']} was used, but it is on that stage only.")


def watch_state(optimizer: Optimizer) -> Callable[[], None]:
    """Make `optimizer.state` a `StageOptimizerState`, also when states are loaded; return what undoes this."""

    def replace(optimizer: Optimizer) -> None:
        optimizer.state = StageOptimizerState(dict, optimizer.state)

    def undo() -> None:
        handle.remove()
        optimizer.state = defaultdict(dict, optimizer.state)

    replace(optimizer)
    handle = optimizer.register_load_state_dict_post_hook(replace)
    return undo


def refuse(message: str) -> NoReturn:
    """Raise a `ConfigurationError` for code that needs what another stage has."""
    raise ConfigurationError(
        f"{message} On all ranks, full_parameter(parameter), full_gradient(parameter) and full_optimizer_state("
        "parameter, key) of trainer.strategy return whole tensors, and gradient_norm() the norm of all gradients. Clip "
        "with Trainer(gradient_clip_val=...). To change parameters, gradients or states in hooks, train with "
        "paral_fsdp."
    )


def _is_of_user(frame: FrameType) -> bool:
    """Return whether the code of `frame` is neither of a library nor in a method of an optimizer."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__", ""))
    is_of_library = f"{name}.".startswith(_LIBRARIES) and name != _OF_USERS
    return not is_of_library and not isinstance(frame.f_locals.get("self"), Optimizer)
