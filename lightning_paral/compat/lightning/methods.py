"""Replace methods of Lightning's objects during a run."""

from contextlib import ExitStack
from typing import Any

from lightning_paral.compat.private_name import no_attribute


def shadow_method(instance: object, name: str, value: Any, undo: ExitStack | None = None) -> None:
    """Replace the method `name` of `instance` with `value`, until `undo` is closed.

    Raises:
        PrivateNameError: `instance` has no such method, so nothing would call the new one.
    """
    if not callable(getattr(type(instance), name, None)):
        raise no_attribute(instance, name)
    if undo is not None:
        if name in vars(instance):  # such as the hooks of a `LambdaCallback`
            undo.callback(vars(instance).update, {name: vars(instance)[name]})
        undo.callback(vars(instance).pop, name, None)
    vars(instance)[name] = value
