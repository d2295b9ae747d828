"""How torch saves and loads each part of a module, inside `Module.state_dict` and `Module.load_state_dict`."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lightning_paral.compat.private_name import PrivateName

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
"""How the names of what `Module.get_extra_state` returns end in a state dict."""

_SEEN = "torch 2.11 to 2.13"
_SAVE = PrivateName(
    name="torch.nn.Module._save_to_state_dict",
    purpose="to save what a rank holds in the place of parameters",
    reason="state_dict calls it on each part, inside the methods that users override",
    seen=_SEEN,
    parameters=("self", "destination", "prefix", "keep_vars"),
)
_LOAD = PrivateName(
    name="torch.nn.Module._load_from_state_dict",
    purpose="to load what a rank needs into parameters",
    reason="load_state_dict calls it on each part, inside the methods that users override",
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
        purpose="to run hooks that rename what older versions saved once, before it is loaded",
        reason="nothing public lists the hooks of a module, or leaves them out",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.nn.Module._metadata",  # of what `state_dict` returns
        purpose="to keep the versions of modules with a state dict",
        reason="torch hands them over as an attribute of the dictionary",
        seen=_SEEN,
        on_instances=True,
    ),
    PrivateName(
        name="torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX",
        purpose="to tell extra states from tensors",
        reason="nothing public has it",
        seen=_SEEN,
    ),
)


def versions_in(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Return what torch keeps with a state dict about each module, by the module's name; `None` if nothing."""
    return getattr(state_dict, "_metadata", None)


def set_versions(state_dict: "OrderedDict[str, Any]", versions: Any) -> None:
    """Let torch find `versions`, from `versions_in`, with `state_dict`."""
    state_dict._metadata = versions  # type: ignore[attr-defined]


def load_hooks(part: Module) -> "dict[int, Callable[..., Any]]":
    """Return the hooks of `part` itself that change a state dict before it is loaded."""
    return part._load_state_dict_pre_hooks


def set_load_hooks(part: Module, hooks: "dict[int, Callable[..., Any]]") -> None:
    """Let `part` have other such hooks."""
    part._load_state_dict_pre_hooks = hooks


def save_own(part: Module, destination: dict[str, Any], prefix: str) -> None:
    """Put parameters, buffers and extra state of `part` itself into `destination`, with its names after `prefix`."""
    part._save_to_state_dict(destination, prefix, keep_vars=True)


@contextmanager
def saving_by(module: Module, method: Callable[..., None]) -> Iterator[None]:
    """Have each part of `module` saved by `method(part, own, destination, prefix, keep_vars)`; `own` is torch's."""
    with _shadowed(module, _SAVE, method):
        yield


@contextmanager
def loading_by(module: Module, method: Callable[..., None]) -> Iterator[None]:
    """Have each part of `module` loaded by `method(part, own, state_dict, prefix, about, *rest)`; `own` is torch's.

    `rest` is `strict`, and the lists of missing names, unexpected names and errors.
    """
    with _shadowed(module, _LOAD, method):
        yield


@contextmanager
def _shadowed(module: Module, entry: PrivateName, method: Callable[..., None]) -> Iterator[None]:
    """Call `method(part, own, ...)` in the place of `own`, a method of each part of `module`; set on instances."""
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
