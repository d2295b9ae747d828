"""Replace methods of Lightning's classes during a run, so that users' subclasses inherit the new ones."""

from collections.abc import Callable, Mapping
from typing import Any


def replace_methods(kind: type, methods: Mapping[str, Any]) -> Callable[[], None]:
    """Replace methods of the class `kind`; return a function that restores them.

    A subclass that calls `super().setup(...)` reaches the new method; one set on the instance it would not reach.
    """
    before = {name: vars(kind)[name] for name in methods}
    for name, method in methods.items():
        setattr(kind, name, method)

    def undo() -> None:
        for name, method in before.items():
            setattr(kind, name, method)

    return undo
