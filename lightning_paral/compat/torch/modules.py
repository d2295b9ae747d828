"""The dictionaries in which a module keeps its own parameters, buffers and submodules."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter

from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.nn.Module": {
        "._parameters": "replace a module's parameters without calling its methods",
        "._buffers": "replace a module's buffers without calling its methods",
        "._modules": "give a copy of a module copies of its submodules",
    },
}

own_parameters: Callable[[Module], dict[str, Parameter | None]] = attrgetter("_parameters")
"""Return a module's own dictionary of its direct parameters."""

own_buffers: Callable[[Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return a module's own dictionary of its direct buffers."""

own_children: Callable[[Module], dict[str, Module | None]] = attrgetter("_modules")
"""Return a module's own dictionary of its direct submodules."""


class _ShownParameters(dict[str, Parameter | None]):
    """Parameters that a module shows in place of its own, to which assignments go."""

    def __init__(self, shown: Mapping[str, Parameter | None], own: dict[str, Parameter | None]) -> None:
        super().__init__(shown)
        self._own = own

    def __setitem__(self, name: str, parameter: Parameter | None) -> None:
        self._own[name] = parameter


@contextmanager
def show_parameters(module: Module, shown: Mapping[str, Parameter | None]) -> Iterator[None]:
    """Make `module` have other parameters inside the block.

    Assignments, such as those by which FSDP2 unshards and reshards, still change its own parameters.
    """
    own = own_parameters(module)
    vars(module)["_parameters"] = _ShownParameters(shown, own)
    try:
        yield
    finally:
        vars(module)["_parameters"] = own
