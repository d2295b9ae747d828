"""Methods of Lightning's classes replaced for the time of a run, so that subclasses of the user's inherit ours."""

from collections.abc import Callable, Mapping
from typing import Any


def replace_methods(kind: type, methods: Mapping[str, Any]) -> Callable[[], None]:
    """Give the class `kind` other methods; return what gives it back its own.

    A subclass that calls `super().setup(...)` gets them, too, which an attribute of the instance would not see to.
    """
    before = {name: vars(kind)[name] for name in methods}
    for name, method in methods.items():
        setattr(kind, name, method)

    def undo() -> None:
        for name, method in before.items():
            setattr(kind, name, method)

    return undo
