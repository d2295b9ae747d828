"""Check the names and values of options when an object is constructed, and say what is wrong, given and allowed."""

import inspect
import numbers
import reprlib
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, Union

from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names

Init = TypeVar("Init", bound=Callable[..., None])
Class = TypeVar("Class", bound=type)
Options = TypeVar("Options")
P = ParamSpec("P")


@dataclass(frozen=True)
class AtLeast:
    """The smallest value of an option: `Annotated[int, AtLeast(1)]`."""

    value: float


Positive = Annotated[int, AtLeast(1)]


def checked_options(init: Init) -> Init:
    """Make a constructor reject unknown keywords, and values that its annotations do not allow.

    Raises:
        ConfigurationError: raised by the constructor; suggests an option, or says what the option takes.
    """
    owner = init.__qualname__.split(".")[0]

    @wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        _check(owner, init, args, keywords)
        init(self, *args, **keywords)

    return typing.cast(Init, checked)


def checked_dataclass(cls: Class) -> Class:
    """Apply `checked_options` to a dataclass. Write this decorator above `@dataclass`."""
    init = vars(cls)["__init__"]
    init.__qualname__ = f"{cls.__name__}.__init__"
    cls.__init__ = checked_options(init)  # type: ignore[misc]
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

    def decorate(init: Callable[[Any, Options], None]) -> Callable[Concatenate[Any, P], None]:
        owner = init.__qualname__.split(".")[0]

        @wraps(init)
        def checked(self: Any, *args: P.args, **keywords: P.kwargs) -> None:
            _check(owner, options, args, keywords)
            init(self, options(*args, **keywords))

        bases = typing.cast(type, options).__mro__
        inherited = {name for base in bases[1:] for name in vars(base).get("__dataclass_fields__", ())}
        parameters = sorted(inspect.signature(options).parameters.values(), key=lambda each: each.name in inherited)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        checked.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        documented = [inspect.cleandoc(vars(cls).get("__doc__") or "") for cls in bases]
        sections = [text.partition("Args:\n")[2].partition("\n\n")[0] for text in documented]
        checked.__doc__ = "\n".join([f"Take the options of `{owner}`.", "", "Args:", *filter(None, sections)])
        return typing.cast(Callable[Concatenate[Any, P], None], checked)

    return decorate


@cache
def _types(callee: Callable[..., Any]) -> dict[str, Any]:
    init = vars(callee)["__init__"] if isinstance(callee, type) else callee
    return typing.get_type_hints(init, include_extras=True)


def _check(owner: str, callee: Callable[..., Any], args: Collection[Any], keywords: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` if a constructor or dataclass does not take these arguments.

    Args:
        owner: the name of the class that users construct.
        callee: what will be called.
        args: the arguments by position, without `self`.
        keywords: the arguments by keyword.
    """
    parameters = [each for each in inspect.signature(callee).parameters.values() if each.name != "self"]
    known = [each.name for each in parameters]
    num_positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    advice: Mapping[str, str] = getattr(callee, "advice", {})
    if len(args) > num_positional:
        raise ConfigurationError(
            f"{owner} takes {num_positional or 'none'} of its options by position, but got {len(args)}. Name the "
            f"others, as in {owner}({known[-1]}=...)."
        )
    for option in keywords:
        if option not in known:
            hint = advice.get(option) or did_you_mean(nearest_names(option, known))
            raise ConfigurationError(
                f"{owner} has no option {option!r}. {hint or f'`help({owner})` describes its options.'}"
            )
    for option, value in {**dict(zip(known, args, strict=False)), **keywords}.items():
        kind = _types(callee).get(option, Any)
        if _allows(kind, value):
            continue
        words = sorted(dict.fromkeys(words for words, _ in _alternatives(kind)), key="None".__eq__)
        near = nearest_names(repr(value), words, 1) if isinstance(value, str) else []
        hints = [did_you_mean(near), advice.get(option, "")]
        raise ConfigurationError(
            f"{owner}({option}={reprlib.repr(value)}): {option} has to be {_join_with_or(words)}."
            + "".join(f" {hint}" for hint in hints if hint)
        )


def _alternatives(kind: Any) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """Yield for each member of a union how to describe it, and a function that says whether it allows a value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, UnionType):
        for member in arguments:
            yield from _alternatives(member)
    elif origin is Literal:
        for choice in arguments:
            yield repr(choice), partial(_is_same, choice)
    elif origin is Annotated:
        ((words, allowed),) = _alternatives(arguments[0])
        least = arguments[1].value
        yield f"{words} of at least {least}", lambda value: allowed(value) and value >= least
    elif kind in (Any, object):
        yield "anything", lambda value: True
    elif kind in _PLAIN:
        yield _PLAIN[kind]
    elif origin is type:
        yield "a class", lambda value: isinstance(value, type) and issubclass(value, arguments)
    elif origin is Callable or kind is Callable:
        yield "a function", callable
    elif origin is not None and issubclass(origin, Mapping):
        yield "a dict", lambda value: isinstance(value, Mapping)
    elif origin is not None and issubclass(origin, Collection):
        each = _join_with_or([words for words, _ in _alternatives(arguments[0])])
        yield f"a list (each {each})", lambda value: _is_list(value) and all(_allows(arguments[0], e) for e in value)
    else:
        yield f"{kind.__name__}(...)", lambda value: isinstance(value, origin or kind)


def _is_same(choice: object, value: object) -> bool:
    return type(value) is type(choice) and value == choice  # True is not 1


def _allows(kind: Any, value: object) -> bool:
    return any(allowed(value) for _, allowed in _alternatives(kind))


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)),
    int: ("an integer", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    timedelta: ("a timedelta", lambda value: isinstance(value, timedelta)),
    NoneType: ("None", lambda value: value is None),
}


def _join_with_or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def check_at_least(owner: str, option: str, value: float | None, least: float) -> None:
    """Raise a `ConfigurationError` if `value` is smaller than `least`, or NaN. `None` is allowed."""
    if value is not None and not value >= least:
        raise ConfigurationError(f"{owner}({option}={value!r}): {option} has to be at least {least}.")
