"""Replace methods of Lightning's classes and objects during a run."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from lightning_paral.errors import PrivateNameError

NAMES = ()


def replace_methods(kind: type, methods: Mapping[str, Any]) -> Callable[[], None]:
    """Replace methods of the class `kind`; return a function that restores them.

    A user's subclass that calls `super().setup(...)` reaches the new method, but not one set on the instance.

    Raises:
        PrivateNameError: the class does not define one of them itself, so nothing would call the new one.
    """
    for name in methods:
        if name not in vars(kind):
            raise _no_such_method(kind, name)
    before = {name: vars(kind)[name] for name in methods}
    for name, method in methods.items():
        setattr(kind, name, method)

    def undo() -> None:
        for name, method in before.items():
            setattr(kind, name, method)

    return undo


def shadow_method(instance: object, name: str, value: Any, undo: ExitStack | None = None) -> None:
    """Replace the method `name` of `instance` by `value`, until `undo` is closed.

    Raises:
        PrivateNameError: it has no such method, so nothing would call the new one.
    """
    if not callable(getattr(type(instance), name, None)):
        raise _no_such_method(type(instance), name)
    vars(instance)[name] = value
    if undo is not None:
        undo.callback(vars(instance).pop, name, None)


def _no_such_method(kind: type, name: str) -> PrivateNameError:
    return PrivateNameError(
        f"lightning_paral replaces {kind.__module__}.{kind.__qualname__}.{name} during a run, and lightning "
        f"{version('lightning')} has no such method. Install a version that lightning_paral was tested with."
    )
