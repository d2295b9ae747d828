"""Classes of sharded modules that have the names of the user's classes, and can be created for every class."""

from typing import Any, NoReturn

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.distributed.fsdp._fully_shard._fully_shard.cls_to_fsdp_cls",
        purpose="to give the class of a sharded module the name of the user's class, and to support every class",
        reason="fully_shard creates the class itself unless this dictionary has one, and has no option for it",
        seen="torch 2.11 to 2.13",
    ),
)


def prepare_class(module: Module) -> None:
    """Create the class that `fully_shard` assigns to `module`, in place of torch's (torch 2.11 to 2.13).

    torch's class has a name such as `FSDPLinear`, which appears in messages. torch cannot create it if `Generic` or
    another class without `__dict__` is the first base (`object layout differs`), or if `__init_subclass__` requires
    arguments. Metaclasses and `__init_subclass__` methods that register classes would also register torch's class.
    """
    original = type(module)
    if original not in cls_to_fsdp_cls and not issubclass(original, FSDPModule):
        attributes = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__deepcopy__": _refuse_deepcopy,
        }
        cls_to_fsdp_cls[original] = _simple_class(original, attributes) or _unregistered_class(original, attributes)


def _simple_class(original: type[Module], attributes: dict[str, Any]) -> type | None:
    """Return a class with the bases that torch uses, or `None` if it cannot be created or would be registered."""
    if type(original) is not type or any("__init_subclass__" in vars(base) for base in original.__mro__[:-1]):
        return None
    sharded = type(original.__name__, (FSDPModule, original), dict(attributes))
    try:
        object.__new__(original).__class__ = sharded
    except TypeError:  # the object layouts differ
        return None
    return sharded


class _NoInitSubclass:
    """Keeps the `__init_subclass__` of a user's class from being called."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _unregistered_class(original: type[Module], attributes: dict[str, Any]) -> type:
    """Return a class that is created without running code of a metaclass or `__init_subclass__` of `original`."""

    class Meta(type(original)):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
            return type.__new__(mcs, name, bases, attributes)

        def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
            type.__init__(cls, name, bases, attributes)

        def mro(cls) -> list[type]:
            # `original` must be the first base for its object layout, but FSDPModule's methods must be found first.
            return [cls, _NoInitSubclass, FSDPModule, *original.__mro__]

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # As with torch's class, `type(module)(...)` creates an unsharded module: slicing a ModuleList needs this.
        return original(*args, **kwargs)

    sharded: type = Meta(original.__name__, (original, FSDPModule), attributes | {"__new__": new})
    return sharded


def _refuse_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy.")  # torch's own message, which a caller explains
