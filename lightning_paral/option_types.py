"""Check the names and values of options when an object is constructed, and say what is wrong, given and allowed."""

import inspect
import numbers
import reprlib
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, Union

from lightning_paral.errors import ConfigurationError
from lightning_paral.text import did_you_mean, nearest_names

Class = TypeVar("Class", bound=type)
Options = TypeVar("Options")
P = ParamSpec("P")


@dataclass(frozen=True)
class AtLeast:
    """The smallest value of an option: `Annotated[int, AtLeast(1)]`."""

    value: float


Positive = Annotated[int, AtLeast(1)]


def checked(cls: Class) -> Class:
    """Make the constructor of a class, or of a dataclass, reject unknown keywords and values of other types.

    Raises:
        ConfigurationError: raised by the constructor; suggests an option, or says what the option takes.
    """
    init = vars(cls)["__init__"]

    @wraps(init)
    def checked_init(self: Any, *args: Any, **keywords: Any) -> None:
        _check(cls.__name__, cls, args, keywords)
        init(self, *args, **keywords)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Any, Options], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator for the constructor of a strategy, `def __init__(self, options: MyOptions)`.

    Users give the fields of the dataclass as keywords. The constructor then has their signature and their documentation
    for users, `help` and jsonargparse, and rejects unknown keywords and values of other types.

    Args:
        options: the dataclass. Its docstring, and those of its bases, document the fields in a section `Args`. Its
            attribute `advice` may say by the name of an option what to do if it is unknown or has a wrong type.
    """
    cls = typing.cast(type, options)

    def decorate(init: Callable[[Any, Options], None]) -> Callable[Concatenate[Any, P], None]:
        owner = init.__qualname__.split(".")[0]

        @wraps(init)
        def checked_init(self: Any, *args: P.args, **keywords: P.kwargs) -> None:
            _check(owner, cls, args, keywords)
            init(self, options(*args, **keywords))

        inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__dataclass_fields__", ())}
        parameters = sorted(inspect.signature(cls).parameters.values(), key=lambda each: each.name in inherited)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        checked_init.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        documented = [inspect.cleandoc(vars(base).get("__doc__") or "") for base in cls.__mro__]
        sections = [text.partition("Args:\n")[2].partition("\n\n")[0] for text in documented]
        checked_init.__doc__ = "\n".join([f"Take the options of `{owner}`.", "", "Args:", *filter(None, sections)])
        return typing.cast(Callable[Concatenate[Any, P], None], checked_init)

    return decorate


@cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(vars(cls)["__init__"], include_extras=True)


def _check(owner: str, cls: type, args: Collection[Any], keywords: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` if `cls` does not take these arguments; `owner` is what users construct."""
    signature = inspect.signature(cls)
    advice: Mapping[str, str] = getattr(cls, "advice", {})
    for option in keywords:
        if option not in signature.parameters:
            hint = advice.get(option) or did_you_mean(nearest_names(option, signature.parameters))
            raise ConfigurationError(
                f"{owner} has no option {option!r}. {hint or f'`help({owner})` describes its options.'}"
            )
    try:
        given = signature.bind(*args, **keywords).arguments
    except TypeError as error:
        name = [*signature.parameters][-1]
        raise ConfigurationError(f"{owner}: {error}. Give options by name, as in {owner}({name}=...).") from None
    for option, value in given.items():
        kind = _types(cls).get(option, Any)
        if not _allows(kind, value):
            raise ConfigurationError(
                f"{owner}({option}={reprlib.repr(value)}): {option} has to be {_in_words(kind)}. "
                f"{advice.get(option, '')}".rstrip()
            )


_WIDER: dict[Any, Any] = {
    int: numbers.Integral, float: numbers.Real, list: Collection, Sequence: Collection, dict: Mapping, Any: object
}  # fmt: skip
"""What is allowed for a type, where that is more than its instances: numbers of numpy, tuples and sets, and so on."""
_WORDS: dict[Any, str] = {
    bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None", type: "a class",
    list: "a list", Sequence: "a list", dict: "a dict", Mapping: "a dict", Callable: "a function",
}  # fmt: skip


def _members(kind: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the choices of literals, and the types in a union, each with its arguments."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, UnionType, Literal):
        for each in arguments:
            yield from _members(each)
    else:
        yield origin or kind, arguments


def _allows(kind: Any, value: Any) -> bool:
    return any(_is(member, arguments, value) for member, arguments in _members(kind))


def _is(member: Any, arguments: tuple[Any, ...], value: Any) -> bool:
    allowed = _WIDER.get(member, member)
    if isinstance(member, str | int):  # a choice; True is not 1
        return type(value) is type(member) and value == member
    if member is Annotated:
        return _allows(arguments[0], value) and value >= arguments[1].value
    if isinstance(value, bool | str):  # neither a number nor a list
        return member in (bool, str, Any, object) and isinstance(value, allowed)
    if allowed is Collection:
        return (
            isinstance(value, Collection)
            and not isinstance(value, Mapping)
            and all(_allows(arguments[0], each) for each in value)
        )
    return isinstance(value, allowed)


def _in_words(kind: Any) -> str:
    words: list[str] = []
    for member, arguments in _members(kind):
        if member is Annotated:
            words.append(f"{_in_words(arguments[0])} of at least {arguments[1].value}")
        else:
            each = f" (each {_in_words(arguments[0])})" if _WIDER.get(member) is Collection and arguments else ""
            name = repr(member) if isinstance(member, str | int) else _WORDS.get(member) or f"{member.__name__}(...)"
            words.append(name + each)
    *first, last = sorted(dict.fromkeys(words), key="None".__eq__)
    return f"{', '.join(first)} or {last}" if first else last
