"""What a run leaves in globals of DeepSpeed's modules and in a cache of a class, where a next run would meet it."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_FAILED = "to end a `zero.Init` that a failure has left open"
_NEVER_RESET = "DeepSpeed resets it at the end of the context only, and knows no end of a run"

_CACHE = PrivateName(
    name="deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
    "._PartitionedParameterCoordinator__params_to_release",
    purpose="to empty its cache, which would keep every module of stage 3 and its engine alive",
    reason="it is a cache of the class, behind a decorator, and engine.destroy leaves it",
    seen="deepspeed 0.19.8",
)
NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.zero_init_context",
        purpose=_FAILED,
        reason=_NEVER_RESET,
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.top_level_context",
        purpose=_FAILED,
        reason=_NEVER_RESET,
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED",
        purpose="to keep a later fp32 run from being taken for one under autocast",
        reason="DeepSpeed never resets it",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_DTYPE",
        purpose="to keep a later fp32 run from being taken for one under autocast",
        reason="DeepSpeed never resets it",
        seen="deepspeed 0.19.8",
    ),
    _CACHE,
)


def forget_contexts() -> None:
    """Take every `zero.Init` for left."""
    from deepspeed.runtime.zero import partition_parameters

    partition_parameters.zero_init_context = 0
    partition_parameters.top_level_context = None


def forget_autocast() -> None:
    """Take `torch_autocast` for never configured."""
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def forget_modules() -> None:
    """Empty the cache in which stage 3 keeps the modules of all runs."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    decorated: Any = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    within = [decorated, *(cell.cell_contents for cell in getattr(decorated, "__closure__", None) or ())]
    caches = [each for each in within if hasattr(each, "cache_clear")]
    if not caches:
        raise _CACHE.error("there is no cache behind its decorators")
    for cache in caches:
        cache.cache_clear()
