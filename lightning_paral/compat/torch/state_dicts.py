"""How `Module.state_dict` and `Module.load_state_dict` save and load each submodule."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lightning_paral.compat.private_name import Names, named

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
"""The suffix of state-dict keys whose values `Module.get_extra_state` returned."""

NAMES: Names = {
    "torch.nn.Module": {
        "_save_to_state_dict(destination, prefix, keep_vars)": "save shards in place of parameters",
        "_load_from_state_dict(state_dict, prefix, local_metadata, strict)": "load only the shards that a rank holds",
        "._load_state_dict_pre_hooks": "run the hooks that rename old entries once",
        "._metadata": "keep the versions of modules with a state dict",
    },
    "torch.nn.modules.module": {
        "_EXTRA_STATE_KEY_SUFFIX": "distinguish extra states from parameters and buffers in a state dict",
    },
}


def is_of_load_state_dict(frame: FrameType) -> bool:
    """Return whether `frame` is that of the method with which `Module.load_state_dict` loads one submodule."""
    return frame.f_code is Module._load_from_state_dict.__code__


def versions_in(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Return the metadata that torch keeps with a state dict, by module name, or `None` if there is none."""
    return getattr(state_dict, "_metadata", None)


def set_versions(state_dict: "OrderedDict[str, Any]", versions: Any) -> None:
    """Attach `versions`, from `versions_in`, to `state_dict`."""
    state_dict._metadata = versions  # type: ignore[attr-defined]


def load_hooks(part: Module) -> "dict[int, Callable[..., Any]]":
    """Return the hooks that change a state dict before `part` loads it, without those of submodules."""
    return part._load_state_dict_pre_hooks


def set_load_hooks(part: Module, hooks: "dict[int, Callable[..., Any]]") -> None:
    """Replace the hooks that change a state dict before `part` loads it, without those of submodules."""
    part._load_state_dict_pre_hooks = hooks


def save_own(part: Module, destination: dict[str, Any], prefix: str) -> None:
    """Add the parameters, buffers and extra state of `part`, without submodules, to `destination`, under `prefix`."""
    part._save_to_state_dict(destination, prefix, keep_vars=True)


@contextmanager
def save_submodules_by(module: Module, method: Callable[..., None]) -> Iterator[None]:
    """Save each submodule with `method(part, own, destination, prefix, keep_vars)`, where `own` is its own method."""
    with _shadowed(module, "_save_to_state_dict", method):
        yield


@contextmanager
def load_submodules_by(module: Module, method: Callable[..., None]) -> Iterator[None]:
    """Load each submodule with `method(part, own, state_dict, prefix, metadata, *rest)`, where `own` is its own method.

    `rest` consists of `strict` and the lists of missing keys, unexpected keys and errors.
    """
    with _shadowed(module, "_load_from_state_dict", method):
        yield


@contextmanager
def _shadowed(module: Module, name: str, method: Callable[..., None]) -> Iterator[None]:
    """Replace a method of each submodule of `module` with `method(part, own, ...)`, where `own` is the method."""
    named(NAMES, name).resolve()
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
