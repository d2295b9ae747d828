"""How and when `deepspeed.zero.Init` shards parameters."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init._zero_init_param",
        purpose="to shard parameters of any layout, dimension and dtype",
        reason="zero.Init views them as bytes, which torch refuses for scalars, and assumes that they are contiguous",
        seen="deepspeed 0.19.8",
        parameters=("self", "param"),
    ),
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init._post_init_method",
        purpose="to leave modules that from_pretrained builds unsharded until their values are loaded",
        reason="no public function suspends zero.Init",
        seen="deepspeed 0.19.8",
        parameters=("self", "module"),
    ),
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init._convert_to_zero_parameters",
        purpose="to shard single parameters that were built in full",
        reason="zero.Init(module=...) shards whole modules, with a context of its own",
        seen="deepspeed 0.19.8",
        parameters=("self", "param_list"),
    ),
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.Init.unpatch_init_and_builtins",
        purpose="to keep what decorators did to constructors of classes that were defined inside zero.Init",
        reason="it restores the constructors that these classes had before any decorator",
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
)

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
"""The functions of torch that `zero.Init` replaces with its own, which choose device and dtype."""


def partition_parameters_by(init: Any, partition: Callable[[Callable[[Parameter], None], Parameter], None]) -> None:
    """Let `init` shard each parameter by `partition(as_deepspeed_does, parameter)`."""
    as_deepspeed_does = init._zero_init_param
    init._zero_init_param = lambda parameter: partition(as_deepspeed_does, parameter)


def partition_modules_by(init: Any, partition: Callable[[Callable[[Module], None], Module], None]) -> None:
    """Let `init` shard the parameters of each newly built module by `partition(as_deepspeed_does, module)`."""
    as_deepspeed_does = init._post_init_method
    init._post_init_method = lambda module: partition(as_deepspeed_does, module)


def keep_decorated_constructors(init: Any) -> None:
    """Let classes that are defined inside `init` keep constructors that decorators made, when `init` ends.

    Such are the experts of Transformers, whose modules are first imported while the model is built.
    """
    unpatch = init.unpatch_init_and_builtins

    def unpatch_but_for_decorated() -> None:
        patched_code = vars(torch.nn.Linear)["__init__"].__code__
        decorated: dict[Any, Any] = {}
        for kind in _subclasses(Module):
            constructor, before = vars(kind).get("__init__"), vars(kind).get("_old_init")
            if before is not None and constructor is not before and _code_of(constructor) is not patched_code:
                decorated[kind] = constructor
        unpatch()
        for kind, constructor in decorated.items():
            _call_unpatched(constructor, patched_code)
            kind.__init__ = constructor

    init.unpatch_init_and_builtins = unpatch_but_for_decorated


_MOST_DECORATORS = 10
"""Functions may hold each other in a circle."""


def _call_unpatched(function: Any, patched_code: CodeType, depth: int = 0) -> None:
    """Replace patched constructors in the closure of `function`, and of functions there, by what they wrap."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            inner = cell.cell_contents
            if _code_of(inner) is patched_code:
                cell.cell_contents = inner.__wrapped__
            elif isinstance(inner, FunctionType) and depth < _MOST_DECORATORS:
                _call_unpatched(inner, patched_code, depth + 1)


def _subclasses(kind: type[Module]) -> Iterator[type[Module]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


def partition_full(init: Any, parameter: Parameter) -> None:
    """Shard a full parameter. *Collective* over the world; rank 0's values are used."""
    init._convert_to_zero_parameters([parameter])


def plain_constructors() -> dict[str, Callable[..., Tensor]]:
    """Return torch's own tensor constructors; call this outside of any `zero.Init`."""
    return {name: getattr(torch, name) for name in CONSTRUCTORS}


def choose_constructors(plain: dict[str, Callable[..., Tensor]], use_plain: Callable[[], bool]) -> None:
    """Call torch's own constructors if `use_plain()`, else those of `zero.Init`, until the current `zero.Init` ends.

    Args:
        plain: what `plain_constructors` returned before `zero.Init` was entered.
        use_plain: called at every construction.
    """
    for name, own in plain.items():
        setattr(torch, name, _either(use_plain, own, getattr(torch, name)))


def _either(
    use_plain: Callable[[], bool], plain: Callable[..., Tensor], else_: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        return (plain if use_plain() else else_)(*args, **kwargs)

    return construct
