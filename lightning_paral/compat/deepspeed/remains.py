"""State that a run leaves in DeepSpeed's module-level variables and in a cache, which would affect the next run."""

from typing import Any

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "deepspeed.runtime.zero.partition_parameters": {
        "zero_init_context": "end a `zero.Init` context that an exception has left open",
        "top_level_context": "end a `zero.Init` context that an exception has left open",
    },
    "deepspeed.runtime.torch_autocast": {
        "TORCH_AUTOCAST_INITIALIZED": "keep DeepSpeed from treating a later fp32 run as one under autocast",
        "TORCH_AUTOCAST_DTYPE": "keep DeepSpeed from treating a later fp32 run as one under autocast",
    },
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator": {
        "_PartitionedParameterCoordinator__params_to_release": "empty it: it would keep modules and engines alive",
    },
}


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
        raise named(NAMES, "_PartitionedParameterCoordinator__params_to_release").error("its decorators have no cache")
    for each in caches:
        each.cache_clear()
