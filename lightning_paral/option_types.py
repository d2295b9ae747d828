"""Check the names and types of options when an object is constructed."""

import dataclasses
import inspect
import numbers
import reprlib
import typing
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cache, wraps
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union

from lightning_paral.errors import ConfigurationError
from lightning_paral.option_names import explain_unknown_option, register_options

Init = TypeVar("Init", bound=Callable[..., None])
Class = TypeVar("Class", bound=type)

_REMEDIES = {
    ("ParalFSDPStrategy", "offload"): "FSDP offloads to host memory: offload=True. For NVMe, use "
    "ParalZeROStrategy(stage=3, offload_optimizer=Offload('nvme', path=...)).",
    (
        "ParalFSDPStrategy",
        "units",
    ): "Give 'auto', a class, its name, a list of these, or a function of a name and a module.",
    ("", "timeout"): "Give a timedelta, or a number of seconds.",
    ("", "accelerator"): "It belongs to the Trainer: Trainer(accelerator=..., strategy=...).",
    ("", "parallel_devices"): "They belong to the Trainer: Trainer(devices=..., strategy=...).",
    ("", "precision_plugin"): "It belongs to the Trainer: Trainer(precision=..., strategy=...).",
    ("", "deepspeed_config"): "Give a dict or the path of a JSON file.",
    ("", "logging_level"): "Give a level of logging, such as logging.INFO.",
}
"""Remedies by class (empty for all classes) and option, for options where naming the allowed types is not enough."""


def checked_options(
    init: Init,
    *,
    shared: type | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    docstring: str | None = None,
) -> Init:
    """Make a constructor reject unknown keywords and values whose types its annotations do not allow.

    Args:
        init: the constructor.
        shared: a `TypedDict` of further keywords, which `init` takes as `**keywords`. The signature lists those with
            defaults one by one, for users, `help` and jsonargparse.
        defaults: the defaults of keywords in `shared`, in the order of the signature.
        docstring: describes the keywords in `shared`. By default, the docstring of `shared`.

    Raises:
        ConfigurationError: raised by the constructor; suggests an option, or names the types that the option takes.
    """
    signature = _with_shared(inspect.signature(init), shared, defaults)
    owner = init.__qualname__.split(".")[0]
    parameters = {name: parameter for name, parameter in signature.parameters.items() if name != "self"}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    num_positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())
    register_options(owner, named)

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > num_positional:
            raise ConfigurationError(
                f"{owner} takes {num_positional or 'none'} of its options by position, but got {len(args)}. Name the "
                f"options: {owner}({named[num_positional]}=...)."
            )
        for option in kwargs:
            if option not in parameters and not takes_any:
                raise ConfigurationError(explain_unknown_option(owner, option))
        shared_types = {option: allowed for option, allowed in _option_types(shared).items() if option in defaults}
        types = _option_types(init) | shared_types
        for option, value in {**dict(zip(named, args, strict=False)), **kwargs}.items():
            if option in types:
                check_type(owner, option, value, types[option])
        init(self, *args, **kwargs)

    if shared is not None:
        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__doc__ = docstring or shared.__doc__
    return typing.cast(Init, checked)


def _with_shared(signature: inspect.Signature, shared: type | None, defaults: Mapping[str, Any]) -> inspect.Signature:
    """Replace `**keywords` by one parameter for each key of `shared`; keep `**keywords` if it accepts others."""
    if shared is None:
        return signature
    *own, keywords = signature.parameters.values()
    types = typing.get_type_hints(shared)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=types[name])
        for name in defaults
    ]
    is_complete = keywords.annotation == typing.Unpack[shared] and types.keys() == defaults.keys()
    further = [] if is_complete else [keywords.replace(annotation=Any)]
    return signature.replace(parameters=[*own, *parameters, *further])


def checked_dataclass(cls: Class) -> Class:
    """Apply `checked_options` to a dataclass. Write this decorator above `@dataclass`."""
    init = vars(cls)["__init__"]
    init.__qualname__ = f"{cls.__name__}.__init__"
    cls.__init__ = checked_options(init)  # type: ignore[misc]
    return cls


@cache
def _option_types(takes_options: Any) -> dict[str, Any]:
    """Return the types of options by name, for a constructor or a `TypedDict`; an empty dict for `None`."""
    if takes_options is None:
        return {}
    types = typing.get_type_hints(takes_options)
    if not isinstance(takes_options, type):
        for name, parameter in inspect.signature(takes_options).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                types.pop(name, None)
    return types


def check_type(owner: str, option: str, value: object, annotation: Any) -> None:
    """Raise a `ConfigurationError` if `annotation` does not allow `value`.

    Args:
        owner: the name of the class that has the option.
        option: the name of the option.
        value: the value that the user gave.
        annotation: a class, `None`, `Literal`, `Callable`, a collection, or a union of these.
    """
    if allows(annotation, value):
        return
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    if any(value is member and dataclasses.is_dataclass(member) for member in _members(annotation)):
        raise ConfigurationError(
            f"{owner}({option}={name}): this is the class itself. Pass an instance: {option}={name}(...)."
        )
    given = f"the class {name}" if isinstance(value, type) else _with_article(name)
    if isinstance(value, list | tuple | set) and value:
        given += f" of {type(next(iter(value))).__name__}"
    remedy = (
        _REMEDIES.get((owner, option))
        or _REMEDIES.get(("", option))
        or f"Give {_join_with_or(_describe_types(annotation))}."
    )
    if isinstance(value, float) and value.is_integer() and allows(annotation, int(value)):
        remedy = f"Give {int(value)}, an integer."
    raise ConfigurationError(f"{owner}({option}={reprlib.repr(value)}): {option} cannot be {given}. {remedy}")


def check_at_least(owner: str, option: str, value: float | None, least: float) -> None:
    """Raise a `ConfigurationError` if `value` is smaller than `least`, or NaN. `None` is allowed."""
    if value is not None and not value >= least:
        raise ConfigurationError(f"{owner}({option}={value!r}): {option} has to be at least {least}.")


def as_timeout(timeout: timedelta | float) -> timedelta:
    """Return `timeout` as a `timedelta`; a number means seconds.

    Raises:
        ConfigurationError: `timeout` is not positive, or not finite.
    """
    try:
        duration = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (ValueError, OverflowError):  # NaN or infinite
        duration = timedelta(0)
    if duration <= timedelta(0):
        raise ConfigurationError(
            f"timeout={timeout!r} has to be longer than zero and finite: a timedelta, or a number of seconds."
        )
    return duration


def allows(annotation: Any, value: object) -> bool:
    """Return whether `annotation` allows the type of `value`. A `Literal` allows the types of its values."""
    return any(_allows_one(member, value) for member in _members(annotation))


def _allows_one(expected: Any, value: object) -> bool:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any or expected is object:
        return True
    if origin is Literal:
        return any(type(value) is type(choice) for choice in arguments)
    if origin is type:
        return isinstance(value, type) and all(issubclass(value, base) for base in arguments if isinstance(base, type))
    if origin is Callable or expected is Callable:
        return callable(value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Collection):
        plain = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
        return plain and all(allows(arguments[0], element) for element in typing.cast(Collection[Any], value))
    return _is_instance(origin or expected, value)


def _is_instance(expected: type, value: object) -> bool:
    if expected in (int, float):
        number = numbers.Integral if expected is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if isinstance(value, expected):
        return True
    # Accept duck-typed objects in place of objects of torch or Lightning, but not numbers, strings and the like.
    is_foreign = not dataclasses.is_dataclass(expected) and expected.__module__.startswith(("lightning.", "torch"))
    return is_foreign and not isinstance(value, type) and type(value).__module__ != "builtins"


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, UnionType):
        return [inner for member in typing.get_args(annotation) for inner in _members(member)]
    return [NoneType if annotation is None else annotation]


def _describe_types(annotation: Any) -> list[str]:
    words: list[str] = []
    for member in _members(annotation):
        origin = typing.get_origin(member)
        if origin is Literal:
            words += [repr(choice) for choice in typing.get_args(member)]
        elif origin is type:
            words.append("a class")
        elif origin is Callable:
            words.append("a function")
        elif origin is not None and issubclass(origin, Mapping):
            words.append("a dict")
        elif origin is not None and issubclass(origin, Collection):
            words.append("a list")
        elif dataclasses.is_dataclass(member):
            words.append(f"{member.__name__}(...)")  # type: ignore[union-attr]
        else:
            words.append(_TYPE_NAMES.get(member) or _with_article(member.__name__))
    return sorted(dict.fromkeys(words), key="None".__eq__)


_TYPE_NAMES: dict[Any, str] = {
    bool: "True or False",
    float: "a number",
    int: "an integer",
    str: "a string",
    timedelta: "a timedelta",
    NoneType: "None",
}


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def _join_with_or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
