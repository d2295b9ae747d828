"""The dictionaries of modules, their hooks and state dicts, and classes for single modules."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import Names

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
"""Layers that normalize over the batch."""
InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
"""Layers whose weights must have the dtype of their statistics, as those of `BatchNorm`."""


NAMES: Names = {
    "torch.nn.Module": {
        "._parameters; ._buffers; ._modules": "replace what a module has without calling its methods",
        "_compiled_call_impl": "recognize modules compiled by module.compile()",
        "_save_to_state_dict(destination, prefix, keep_vars)": "save shards in place of parameters",
    },
}


# The dictionaries in which a module keeps its own parameters, buffers and submodules

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


# The dictionaries in which a module keeps its hooks


def hooks_in(module: Module, name: str) -> dict[int, Any]:
    """Return the dictionary `name` of hooks or flags of `module`."""
    hooks: dict[int, Any] = getattr(module, name)
    return hooks


@contextmanager
def without_fsdp_loading(module: Module) -> Iterator[None]:
    """Make `load_state_dict` of `module` call none of FSDP2's hooks inside the block, which expect shards."""
    tables = [table for name, table in hook_tables(module).items() if "load_state_dict" in name]
    before = [dict(table) for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp."):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def hook_tables(module: Module) -> dict[str, dict[int, Any]]:
    """Return all dictionaries of hooks and flags of `module`, by attribute name."""
    return {name: value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)}


ALL = tuple(name for name in hook_tables(Module()) if "_forward" in name or "_backward" in name)
"""Names of the dictionaries of hooks that run in a step, and of their flags."""
FORWARD = tuple(name for name in ALL if "_forward" in name)
"""Those of the hooks that run around forward."""


# Classes for single modules: subclasses with the name of the user's class, created for every kind of class

_MARK = "_lightning_paral_for_instance"


def is_for_instance(cls: type) -> bool:
    """Return whether `subclass_of` has made `cls`."""
    return _MARK in vars(cls)


def subclass_of(original: type[Module], first: type, attributes: dict[str, Any]) -> type:
    """Return a class whose methods are those of `first`, and then those of `original`.

    It has the name of `original`. No code of a metaclass or `__init_subclass__` of `original` runs, because that could
    register the class.

    Args:
        original: the class of a module.
        first: a class, or mixin, whose methods override those of `original`.
        attributes: further attributes of the class.
    """
    attributes = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        _MARK: True,
        **attributes,
    }
    return _simple_class(original, first, attributes) or _unregistered_class(original, first, attributes)


def _simple_class(original: type[Module], first: type, attributes: dict[str, Any]) -> type | None:
    """Return a class with two bases, or `None` if it cannot be created or would be registered."""
    if type(original) is not type or any("__init_subclass__" in vars(base) for base in original.__mro__[:-1]):
        return None
    created = type(original.__name__, (first, original), dict(attributes))
    try:
        object.__new__(original).__class__ = created
    except TypeError:  # the object layouts differ
        return None
    return created


class _NoInitSubclass:
    """Keeps the `__init_subclass__` of a user's class from being called."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _unregistered_class(original: type[Module], first: type, attributes: dict[str, Any]) -> type:
    """Return a class that is created without running code of a metaclass or `__init_subclass__` of `original`."""

    class Meta(type(original)):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
            return type.__new__(mcs, name, bases, attributes)

        def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
            type.__init__(cls, name, bases, attributes)

        def mro(cls) -> list[type]:
            # `original` must be the first base for its object layout, but the methods of `first` must be found first.
            of_first = [base for base in first.__mro__ if base not in original.__mro__]
            return [cls, _NoInitSubclass, *of_first, *original.__mro__]

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # `type(module)(...)` creates an ordinary module: slicing a ModuleList needs this.
        return original(*args, **kwargs)

    created: type = Meta(original.__name__, (original, first), attributes | {"__new__": new})
    return created


# Copies of modules without parameters, as `DataParallel` creates them


def copy_without_values(module: Module) -> Module:
    """Return a copy of `module` that has copies of its dictionaries, but no parameters."""
    copy: Module = object.__new__(type(module))
    for name, value in vars(module).items():
        # Recurrent layers keep a list of their weights, which assignments to the copy change.
        has_weights = isinstance(value, list) and any(isinstance(each, Parameter) for each in value)
        vars(copy)[name] = list(value) if has_weights else value
    tables: dict[str, Any] = {"_parameters": {}, "_buffers": dict(own_buffers(module))}
    vars(copy).update(tables, _modules=dict(own_children(module)))
    return copy


# Recognize modules that were compiled by torch.compile


def is_compiled(module: Module) -> bool:
    """Return whether `module` itself was compiled, by `torch.compile(module)` or `module.compile()`."""
    cls = type(module)
    is_result = cls.__name__ == "OptimizedModule" and cls.__module__.startswith("torch.")  # which is slow to import
    return is_result or module._compiled_call_impl is not None


# How `Module.state_dict` and `Module.load_state_dict` save and load each submodule


class _OnlyExtraState(Module):
    def get_extra_state(self) -> None:
        return None


EXTRA_STATE: str = next(iter(_OnlyExtraState().state_dict()))
"""The suffix of state-dict keys whose values `Module.get_extra_state` returned."""


def not_persistent(part: Module) -> set[str]:
    """Return the names of the direct buffers that a state dict leaves out."""
    saved: dict[str, Any] = {}
    save_own(part, saved, "")
    return own_buffers(part).keys() - saved.keys()


def save_own(part: Module, destination: dict[str, Any], prefix: str) -> None:
    """Add the parameters, buffers and extra state of `part`, without submodules, to `destination`, under `prefix`."""
    part._save_to_state_dict(destination, prefix, keep_vars=True)


@contextmanager
def save_submodules_by(module: Module, method: Callable[..., None]) -> Iterator[None]:
    """Save each submodule with `method(part, own, destination, prefix, keep_vars)`, where `own` is its own method."""
    name = "_save_to_state_dict"
    parts = list(module.modules())
    before = [vars(part).get(name) for part in parts]
    try:
        for part in parts:
            vars(part)[name] = partial(method, part, getattr(part, name))
        yield
    finally:
        for part, kept in zip(parts, before, strict=True):
            vars(part).pop(name, None)
            if kept is not None:
                vars(part)[name] = kept


@contextmanager
def loading_hooks(module: Module, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Call `before` as the last and `after` as the first hook of each submodule in `load_state_dict`."""
    handles: list[Any] = []
    for part in module.modules():
        handles.append(part.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
        handles.append(part.register_load_state_dict_post_hook(after))  # type: ignore[no-untyped-call]
        handles[-1].hooks_dict_ref().move_to_end(handles[-1].id, last=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
