"""Classes of sharded modules that have the names of the user's classes, and can be created for every class."""

from typing import Any, NoReturn

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.nn import Module

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.instance_classes import subclass_of

NAMES: Names = {
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "cls_to_fsdp_cls": "name the class of a sharded module as the user's class",
    },
}


def prepare_class(module: Module) -> None:
    """Create the class that `fully_shard` assigns to `module`, in place of torch's (torch 2.11 to 2.13).

    torch's class has a name such as `FSDPLinear`, which appears in messages. torch cannot create it if `Generic` or
    another class without `__dict__` is the first base (`object layout differs`), or if `__init_subclass__` requires
    arguments. Metaclasses and `__init_subclass__` methods that register classes would also register torch's class.
    """
    original = type(module)
    if original not in cls_to_fsdp_cls and not issubclass(original, FSDPModule):
        cls_to_fsdp_cls[original] = subclass_of(original, FSDPModule, {"__deepcopy__": _refuse_deepcopy})


def _refuse_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy.")  # torch's own message, which a caller explains
