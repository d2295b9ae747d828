"""Parameter classes for a run under ZeRO: user code reads full values, and its writes are recorded.

DeepSpeed stores the values that it trains elsewhere: in fp32 master copies at stages 1 and 2, in each rank's shard at
stage 3. Values that hooks and steps write to a parameter would be overwritten by the next step, or would be lost in
the empty tensor that stage 3 leaves in place of a parameter that is not in use.

The classes here replace `torch.nn.Parameter` during a run. They use no memory, and cost no time if only the forward
passes of modules use a parameter.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.engines.zero.parameters.partition import full_shape, is_stage3_parameter

if TYPE_CHECKING:
    from lightning_paral.engines.zero.parameters.writes import Writes

import sys
from types import FrameType
from typing import NoReturn

from lightning_paral.errors import ParalError

_data: Any = Tensor.data
_grad: Any = Tensor.grad

# These need no values, so they run on a partitioned parameter without gathering it.
_METADATA_FUNCTIONS = {
    getattr(Tensor, attribute).__get__
    for attribute in ("requires_grad", "device", "dtype", "is_leaf", "layout", "is_cuda", "is_meta")
} | {
    *(Tensor.requires_grad.__set__, Tensor.requires_grad_, Tensor.is_floating_point, Tensor.is_complex),  # type: ignore[attr-defined]
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
}
# These run on a meta tensor of the full shape.
_SHAPE_FUNCTIONS = {getattr(Tensor, attribute).__get__ for attribute in ("shape", "ndim")} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride, Tensor.is_contiguous),
    *(Tensor.element_size, torch.numel),
}


class Full:
    """Mixin for a parameter whose `data` is full."""

    _writes: "Writes"
    plain_class: type[Parameter]
    """The class that this one replaces."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an ordinary parameter, because one that user code creates is not watched."""
        return cls.plain_class(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The full values. User code may write to them."""
        if is_user_code():
            return self._writes.full_data(self)
        return plain_data(self)  # type: ignore[arg-type]

    @data.setter
    def data(self, values: Tensor) -> None:
        if is_user_code():
            self._writes.assign(self, values)
            return
        with DisableTorchFunctionSubclass():
            _data.__set__(self, values)

    @property
    def grad(self) -> Tensor | None:
        """The gradient. User code that reads it gets an error if the parameter is trained."""
        if self.requires_grad and self._writes.hides_gradients and is_user_code():  # type: ignore[attr-defined]
            refuse_gradient(self._writes.parameter_name(self))
        with DisableTorchFunctionSubclass():
            gradient: Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self._writes.hides_gradients and is_user_code():
            refuse_new_gradient(self._writes.parameter_name(self))
        with DisableTorchFunctionSubclass():
            _grad.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        with DisableTorchFunctionSubclass():
            _grad.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            memo[id(self)] = Parameter(self._writes.full_copy(self), self.requires_grad)  # type: ignore[attr-defined]
        copied: Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Parameter(self._writes.full_copy(self), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[attr-defined, no-untyped-call]


class Gathered(Full):
    """Mixin for a parameter of stage 3 that is gathered now."""

    @property
    def ds_status(self) -> Any:
        """DeepSpeed's status of the parameter: gathered, being gathered, or partitioned."""
        return self.__dict__["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        self.__dict__["ds_status"] = status
        _, gathered, partitioned = _classes(self.plain_class)
        self.__class__ = gathered if status.name == "AVAILABLE" else partitioned


class Partitioned(Gathered):
    """Mixin for a parameter of stage 3 of which this rank has only its shard now.

    An operation on the parameter gathers it first. *Collective* over the world.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA_FUNCTIONS or not is_user_code():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        parameters = find_partitioned((args, kwargs))
        if func in _SHAPE_FUNCTIONS:
            return func(*replace_partitioned(args, _as_shape), **replace_partitioned(kwargs, _as_shape))
        return parameters[0]._writes.run(func, parameters, args, kwargs)


def find_partitioned(values: Any) -> list[Any]:
    """Return the partitioned parameters in nested lists, tuples and dicts, each once, in order."""
    found: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        found.setdefault(id(value), value)
        return value

    replace_partitioned(values, visit)
    return list(found.values())


def replace_partitioned(values: Any, replace: Callable[[Any], Any]) -> Any:
    """Replace partitioned parameters in nested lists, tuples and dicts by `replace(parameter)`."""
    if isinstance(values, Partitioned):
        return replace(values)
    if isinstance(values, dict):
        return {key: replace_partitioned(value, replace) for key, value in values.items()}
    if isinstance(values, list) or type(values) is tuple:
        return type(values)(replace_partitioned(value, replace) for value in values)
    return values


def _as_shape(parameter: Any) -> Tensor:
    return torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta")


@cache
def _classes(plain_class: type[Parameter]) -> tuple[type, type, type]:
    """Return the classes that replace `plain_class`: at stages 1 and 2, and gathered and partitioned at stage 3."""
    mixins = (Full, Gathered, Partitioned)
    members = {"__module__": plain_class.__module__, "plain_class": plain_class}
    full, gathered, partitioned = (type(plain_class.__name__, (mixin, plain_class), dict(members)) for mixin in mixins)
    return full, gathered, partitioned


def watch(parameter: Any, writes: "Writes") -> None:
    """Let `writes` record what user code writes to `parameter`."""
    plain_class: type[Parameter] = type(parameter)
    full, gathered, partitioned = _classes(plain_class)
    parameter._writes = writes
    if not is_stage3_parameter(parameter):
        parameter.__class__ = full
    else:
        parameter.__class__ = gathered if parameter.ds_status.name == "AVAILABLE" else partitioned


def unwatch(parameter: Any) -> None:
    """Restore the class of `parameter`."""
    parameter.__class__ = parameter.plain_class
    del parameter._writes


def plain_data(parameter: Parameter) -> Tensor:
    """Return `parameter.data` without recording the access."""
    with DisableTorchFunctionSubclass():
        values: Tensor = _data.__get__(parameter)
    return values


_ENGINE = ("deepspeed", "lightning_paral")


def is_user_code(depth: int = 2) -> bool:
    """Return whether the function `depth` frames up the stack is user code. Functions of torch are skipped.

    Functions of DeepSpeed and of this package are not user code. Those of Lightning are, because its callbacks act on
    parameters for the user.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            return package not in _ENGINE
        frame = frame.f_back
    return True


class HiddenGradientError(ParalError, RuntimeError):
    """User code read or set `parameter.grad`, which ZeRO does not use."""


def refuse_gradient(name: str) -> NoReturn:
    """Raise the error for a read of `.grad` of the parameter `name`."""
    raise HiddenGradientError(
        f"parameter.grad of {name!r} was read, but under ZeRO gradients are sharded, and not in parameter.grad. Read "
        "full gradients with `self.trainer.strategy.full_gradient(parameter)`, read their norm with "
        "`self.trainer.strategy.gradient_norm()`, and clip them with `self.clip_gradients(optimizer, ...)`."
    )


def refuse_new_gradient(name: str) -> NoReturn:
    """Raise the error for setting `.grad` of the parameter `name`."""
    raise HiddenGradientError(
        f"parameter.grad of {name!r} was set in a hook or step, but under ZeRO gradients are sharded, and not in "
        "parameter.grad: the optimizer would not use it. Change the loss instead, or train with "
        "paral_ddp or paral_fsdp."
    )
