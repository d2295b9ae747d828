"""How and when `deepspeed.zero.Init` shards parameters."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.partition_parameters.Init": {
        "_zero_init_param(param)": "shard parameters of any layout, dimension and dtype",
        "_post_init_method(module)": "shard what from_pretrained builds only after values are loaded",
        "_convert_to_zero_parameters(param_list)": "shard single parameters that were built in full",
        "unpatch_init_and_builtins": "keep decorated constructors of classes defined inside zero.Init",
    },
}

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
"""The functions of torch that `zero.Init` replaces with its own, which choose device and dtype."""


def partition_parameters_by(init: Any, partition: Callable[[Callable[[Parameter], None], Parameter], None]) -> None:
    """Make `init` shard each parameter with `partition(plain, parameter)`, where `plain` is DeepSpeed's own method."""
    plain = init._zero_init_param
    init._zero_init_param = lambda parameter: partition(plain, parameter)


def partition_modules_by(init: Any, partition: Callable[[Callable[[Module], None], Module], None]) -> None:
    """Make `init` shard each new module with `partition(plain, module)`, where `plain` is DeepSpeed's own method."""
    plain = init._post_init_method
    init._post_init_method = lambda module: partition(plain, module)


def keep_decorated_constructors(init: Any) -> None:
    """When `init` ends, keep the decorated constructors of classes that were defined inside it.

    Examples are the classes of experts in Transformers: their modules are first imported while the model is built.
    """
    unpatch = init.unpatch_init_and_builtins

    def unpatch_undecorated() -> None:
        patched_code = vars(torch.nn.Linear)["__init__"].__code__
        decorated: dict[Any, Any] = {}
        for cls in _subclasses(Module):
            constructor, before = vars(cls).get("__init__"), vars(cls).get("_old_init")
            if before is not None and constructor is not before and _code_of(constructor) is not patched_code:
                decorated[cls] = constructor
        unpatch()
        for cls, constructor in decorated.items():
            _unpatch_closure(constructor, patched_code)
            cls.__init__ = constructor

    init.unpatch_init_and_builtins = unpatch_undecorated


_MAX_DEPTH = 10
"""How many nested closures are searched. A limit is needed because functions can refer to each other in a cycle."""


def _unpatch_closure(function: Any, patched_code: CodeType, depth: int = 0) -> None:
    """Replace patched constructors with the original ones in the closure of `function`, and of functions in it."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            inner = cell.cell_contents
            if _code_of(inner) is patched_code:
                cell.cell_contents = inner.__wrapped__
            elif isinstance(inner, FunctionType) and depth < _MAX_DEPTH:
                _unpatch_closure(inner, patched_code, depth + 1)


def _subclasses(cls: type[Module]) -> Iterator[type[Module]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


def partition_full(init: Any, parameter: Parameter) -> None:
    """Shard a full parameter, with the values of rank 0. *Collective* over the world."""
    init._convert_to_zero_parameters([parameter])


def plain_constructors() -> dict[str, Callable[..., Tensor]]:
    """Return torch's own tensor constructors; call this outside of any `zero.Init`."""
    return {name: getattr(torch, name) for name in CONSTRUCTORS}


def choose_constructors(plain: dict[str, Callable[..., Tensor]], use_plain: Callable[[], bool]) -> None:
    """Call torch's own constructors if `use_plain()`, else those of `zero.Init`, until the current `zero.Init` ends.

    Args:
        plain: the constructors that `plain_constructors` returned before `zero.Init` was entered.
        use_plain: called at every construction; returns whether to use the constructor in `plain`.
    """
    for name, own in plain.items():
        setattr(torch, name, _either(use_plain, own, getattr(torch, name)))


def _either(
    use_plain: Callable[[], bool], plain: Callable[..., Tensor], else_: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        return (plain if use_plain() else else_)(*args, **kwargs)

    return construct
