"""Classes for single modules: subclasses with the name of the user's class, created for every kind of class."""

from typing import Any

from torch.nn import Module

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
