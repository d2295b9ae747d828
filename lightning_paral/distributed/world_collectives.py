"""Refuse collectives of user code over all ranks where several ranks have the same samples."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed import nn

from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.errors import ConfigurationError

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "gather", "gather_object")
_REPEATABLE = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
"""Reductions whose result does not change if each value is there equally often."""
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "lightning_paral")
"""Packages that call collectives over all ranks for other purposes than samples, or to which we give groups."""
_OF_LIBRARIES = ("lightning_paral", "mesh_")
"""How the descriptions of our groups, and of those of device meshes, begin."""


def refuse_repeated_samples(same_samples: list[int]) -> Callable[[], None]:
    """Make functions of `torch.distributed` raise an error where they would count samples several times.

    These are sums and gathers over all ranks, called by code that belongs to none of `_LIBRARIES`. Functions that were
    imported by name before are not found.

    Args:
        same_samples: some ranks that have the same samples, for the message.

    Returns:
        Callable[[], None]: a function that restores `torch.distributed`.
    """
    undo = ExitStack()
    for owner in (dist, nn, nn.functional):
        own = {name: vars(owner)[name] for name in (*_REDUCTIONS, *_GATHERS) if name in vars(owner)}
        checked = {name: _checked(f"{owner.__name__}.{name}", each, same_samples) for name, each in own.items()}
        undo.callback(replace_attributes(owner, checked))
    return undo.close


def _checked(name: str, function: Callable[..., Any], same_samples: list[int]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _is_of_library(sys._getframe(1).f_globals.get("__name__", "")):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if _counts_twice(given.arguments):
                raise ConfigurationError(
                    f"{name} was called over all ranks, but ranks "
                    f"{', '.join(map(str, same_samples))} have the same samples, which would count once for each. Give "
                    "the group of the ranks that have different samples, group=trainer.strategy.dims.data_group(), or "
                    "use self.all_gather or trainer.strategy.reduce."
                )
        return function(*args, **kwargs)

    return checked


def _counts_twice(arguments: dict[str, Any]) -> bool:
    group: Any = arguments.get("group") or dist.group.WORLD
    has_all_ranks = dist.get_world_size(group) == dist.get_world_size()
    is_of_user = group is dist.group.WORLD or not group.group_desc.startswith(_OF_LIBRARIES)
    return has_all_ranks and is_of_user and arguments.get("op") not in _REPEATABLE


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
