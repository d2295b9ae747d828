"""Replace attributes of classes and modules of the libraries temporarily."""

from collections.abc import Callable, Mapping
from typing import Any

_ABSENT = object()


def replace_attributes(owner: Any, attributes: Mapping[str, Any]) -> Callable[[], None]:
    """Replace attributes of `owner`, a class or module; return a function that restores them.

    Raises:
        AttributeError: `owner` neither has nor inherits one of the attributes, so nothing would use the new value.
    """
    for name in attributes:
        getattr(owner, name)
    before = {name: vars(owner).get(name, _ABSENT) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)

    def undo() -> None:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    return undo
