"""How `Module.state_dict` and `Module.load_state_dict` save and load each submodule."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lightning_paral.compat.private_name import PrivateName

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
"""The suffix of state-dict keys whose values `Module.get_extra_state` returned."""

_SEEN = "torch 2.11 to 2.13"
_SAVE = PrivateName(
    name="torch.nn.Module._save_to_state_dict",
    purpose="to save a rank's shards in place of parameters",
    reason="no public hook replaces how state_dict saves one submodule",
    seen=_SEEN,
    parameters=("self", "destination", "prefix", "keep_vars"),
)
_LOAD = PrivateName(
    name="torch.nn.Module._load_from_state_dict",
    purpose="to load only the shards that a rank holds",
    reason="no public hook replaces how load_state_dict loads one submodule",
    seen=_SEEN,
    parameters=(
        *("self", "state_dict", "prefix", "local_metadata", "strict"),
        *("missing_keys", "unexpected_keys", "error_msgs"),
    ),
)
NAMES = (
    _SAVE,
    _LOAD,
    PrivateName(
        name="torch.nn.Module._load_state_dict_pre_hooks",
        purpose="to run the hooks that rename entries of older versions once instead of twice",
        reason="no public function lists or disables the hooks of a module",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.nn.Module._metadata",  # an attribute of the dictionary that `state_dict` returns
        purpose="to keep the versions of modules with a state dict",
        reason="torch stores them in this private attribute of the dictionary",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX",
        purpose="to distinguish extra states from parameters and buffers in a state dict",
        reason="no public name gives the suffix of their keys",
        seen=_SEEN,
    ),
)


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
    with _shadowed(module, _SAVE, method):
        yield


@contextmanager
def load_submodules_by(module: Module, method: Callable[..., None]) -> Iterator[None]:
    """Load each submodule with `method(part, own, state_dict, prefix, metadata, *rest)`, where `own` is its own method.

    `rest` consists of `strict` and the lists of missing keys, unexpected keys and errors.
    """
    with _shadowed(module, _LOAD, method):
        yield


@contextmanager
def _shadowed(module: Module, entry: PrivateName, method: Callable[..., None]) -> Iterator[None]:
    """Replace a method of each submodule of `module` with `method(part, own, ...)`, where `own` is the method."""
    entry.resolve()
    name = entry.name.rpartition(".")[2]
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
