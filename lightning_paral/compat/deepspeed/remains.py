"""State that a run leaves in DeepSpeed's module-level variables and in a cache, which would affect the next run."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_FAILED = "to end a `zero.Init` context that an exception has left open"
_NEVER_RESET = "DeepSpeed resets it only at the end of the context"

_CACHE = PrivateName(
    name="deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
    "._PartitionedParameterCoordinator__params_to_release",
    purpose="to empty its cache, which would keep every stage-3 module and its engine alive",
    reason="engine.destroy does not empty the cache, and no other public function does",
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
        purpose="to keep DeepSpeed from treating a later fp32 run as one under autocast",
        reason="DeepSpeed never resets it, and has no public function for this",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_DTYPE",
        purpose="to keep DeepSpeed from treating a later fp32 run as one under autocast",
        reason="DeepSpeed never resets it, and has no public function for this",
        seen="deepspeed 0.19.8",
    ),
    _CACHE,
)


def forget_contexts() -> None:
    """Mark every `zero.Init` context as ended."""
    from deepspeed.runtime.zero import partition_parameters

    partition_parameters.zero_init_context = 0
    partition_parameters.top_level_context = None


def forget_autocast() -> None:
    """Mark `torch_autocast` as never configured."""
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
        raise _CACHE.error("its decorators have no cache")
    for cache in caches:
        cache.cache_clear()
