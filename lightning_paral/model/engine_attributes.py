"""Recognize the attributes and classes that engines give to modules and parameters when they shard them."""

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_paral.compat.deepspeed.stage3 import is_zero_attribute
from lightning_paral.compat.torch.modules import is_for_instance


def describes_shards(name: str) -> bool:
    """Return whether `name` is an attribute of a module or parameter in which ZeRO describes its shards."""
    return is_zero_attribute(name)


def is_left_partitioned(parameter: Tensor) -> bool:
    """Return whether a failed run under ZeRO stage 3 left `parameter` partitioned, so that it lacks its values."""
    return any(map(describes_shards, vars(parameter)))


def class_without_engine(cls: type) -> type:
    """Return the class that a module of class `cls` had before an engine replaced it with a subclass."""
    bases = [base for base in cls.__mro__ if issubclass(base, Module) and not is_for_instance(base)]
    return next(base for base in bases if not issubclass(base, FSDPModule))
