"""Replace methods of Lightning's classes and objects during a run."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.errors import PrivateNameError


def replace_methods(cls: type, methods: Mapping[str, Any]) -> Callable[[], None]:
    """Replace methods of the class `cls`; return a function that restores them.

    Unlike a method set on an instance, the new method is also reached from a user's subclass that calls
    `super().setup(...)`.

    Raises:
        PrivateNameError: `cls` does not define one of the methods itself, so nothing would call the new one.
    """
    for name in methods:
        if name not in vars(cls):
            raise _no_such_method(cls, name)
    return replace_attributes(cls, methods)


def shadow_method(instance: object, name: str, value: Any, undo: ExitStack | None = None) -> None:
    """Replace the method `name` of `instance` with `value`, until `undo` is closed.

    Raises:
        PrivateNameError: `instance` has no such method, so nothing would call the new one.
    """
    if not callable(getattr(type(instance), name, None)):
        raise _no_such_method(type(instance), name)
    if undo is not None:
        if name in vars(instance):  # such as the hooks of a `LambdaCallback`
            undo.callback(vars(instance).update, {name: vars(instance)[name]})
        undo.callback(vars(instance).pop, name, None)
    vars(instance)[name] = value


def _no_such_method(cls: type, name: str) -> PrivateNameError:
    return PrivateNameError(
        f"lightning_paral replaces {cls.__module__}.{cls.__qualname__}.{name} during a run, but lightning "
        f"{version('lightning')} has no such method. Install a version that lightning_paral was tested with."
    )
