"""Classes of sharded modules: named after the user's classes, and available for a module of any class."""

from typing import Any, NoReturn

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.distributed.fsdp._fully_shard._fully_shard.cls_to_fsdp_cls",
        purpose="to name the class of a sharded module after the user's, and to support every class",
        reason="fully_shard creates the class itself, unless it finds one here",
        seen="torch 2.11 to 2.13",
    ),
)


def prepare_class(module: Module) -> None:
    """Make the class that `fully_shard` gives `module`, in place of torch's (torch 2.11 to 2.13).

    torch's class is called `FSDPLinear` in every message. It cannot be made if `Generic` or another class without
    `__dict__` is the first base (`object layout differs`) or if `__init_subclass__` requires arguments. Metaclasses and
    `__init_subclass__` methods that register classes would register it, too.
    """
    original = type(module)
    if original not in cls_to_fsdp_cls and not issubclass(original, FSDPModule):
        attributes = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__deepcopy__": _refuse_deepcopy,
        }
        cls_to_fsdp_cls[original] = _in_torchs_way(original, attributes) or _unnoticed(original, attributes)


def _in_torchs_way(original: type[Module], attributes: dict[str, Any]) -> type | None:
    if type(original) is not type or any("__init_subclass__" in vars(base) for base in original.__mro__[:-1]):
        return None
    sharded = type(original.__name__, (FSDPModule, original), dict(attributes))
    try:
        object.__new__(original).__class__ = sharded
    except TypeError:  # another layout
        return None
    return sharded


class _Unannounced:
    """Keeps the `__init_subclass__` of a user's class from being called."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _unnoticed(original: type[Module], attributes: dict[str, Any]) -> type:
    class Meta(type(original)):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
            return type.__new__(mcs, name, bases, attributes)

        def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
            type.__init__(cls, name, bases, attributes)

        def mro(cls) -> list[type]:
            # `original` is the first base, for its layout; FSDPModule's methods come first all the same.
            return [cls, _Unannounced, FSDPModule, *original.__mro__]

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # `type(module)(...)` makes an unsharded module, as with torch's own class: slicing a ModuleList does this.
        return original(*args, **kwargs)

    sharded: type = Meta(original.__name__, (original, FSDPModule), attributes | {"__new__": new})
    return sharded


def _refuse_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy.")  # in torch's words, which are explained
