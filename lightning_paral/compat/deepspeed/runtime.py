"""DeepSpeed's backend, operators and module-level state."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lightning_paral.compat.private_name import Names, named
from lightning_paral.compat.torch.process_groups import is_alive

NAMES: Names = {
    "deepspeed.comm.comm": {
        "cdb": "run DeepSpeed's collectives through our own backend, and to remove it after a run",
    },
    "deepspeed.comm.torch.TorchBackend": {
        "reduce": "override it with an implementation for gloo",
        "reduce_scatter_tensor": "override it with an implementation for gloo",
        "all_gather_into_tensor": "override it with an implementation for gloo",
    },
    "deepspeed.utils.groups": {
        "_WORLD_GROUP": "destroy the process group that a run has left behind",
        "_release_process_group_references(group)": "make DeepSpeed forget its destroyed process groups",
    },
    "deepspeed.ops.op_builder.builder.OpBuilder": {
        "_loaded_ops": "let DeepSpeed find operators that have been compiled once",
    },
    "deepspeed.ops": {"__compatible_ops__": "keep DeepSpeed from compiling shared-memory collectives (deepspeed#7625)"},
    "deepspeed.runtime.torch_autocast": {
        "TORCH_AUTOCAST_INITIALIZED": "keep DeepSpeed from treating a later fp32 run as one under autocast",
        "TORCH_AUTOCAST_DTYPE": "keep DeepSpeed from treating a later fp32 run as one under autocast",
    },
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator": {
        "_PartitionedParameterCoordinator__params_to_release": "empty it: it would keep modules and engines alive",
    },
}


# The backend that runs DeepSpeed's collectives, which is a module-level variable of DeepSpeed


def current_backend() -> Any:
    """Return DeepSpeed's backend, or `None` if it has none."""
    import deepspeed

    return deepspeed.comm.comm.cdb


def make_backend(cls: Any, name: str) -> Any:
    """Return an instance of `cls`, a subclass of `TorchBackend`, for torch's backend `name` and the default group."""
    return cls(name, timedelta(0), None)  # the group exists, so the timeout has no effect


def use_backend(backend: Any) -> None:
    """Make DeepSpeed run its collectives through `backend`; `None` removes the current backend."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


@contextmanager
def answering_rank() -> Iterator[None]:
    """Let DeepSpeed ask for the rank inside this context, also after a run, when it has no backend."""
    backend = current_backend()
    if backend is None:
        use_backend(SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group: 1))  # rank 0 prints messages
    try:
        yield
    finally:
        use_backend(backend)


# Process groups that DeepSpeed creates on demand, and keeps in module-level variables


def release_groups() -> None:
    """Destroy DeepSpeed's process group of all ranks, and make it forget all of them.

    Those of ZeRO++ stay until the default group is destroyed.
    """
    from deepspeed.utils import groups

    if is_alive(groups._WORLD_GROUP):  # otherwise it was destroyed with an earlier default group
        dist.destroy_process_group(groups._WORLD_GROUP)
    groups._release_process_group_references()


# Operators. Keep backends from compiling those for shared-memory collectives

_SHARED_MEMORY = ("deepspeed_shm_comm", "shm_comm")


def load_compiled(name: str, file: Path) -> None:
    """Load the compiled operator `name` from `file`, so that DeepSpeed finds it."""
    from deepspeed.ops.op_builder import PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    if name in OpBuilder._loaded_ops:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[name] = module
    if name == PinMemoryBuilder.NAME:
        PinMemoryBuilder().load()  # gives `async_io` its symbols


def disable_shared_memory() -> None:
    """Keep backends that are created after this call from compiling shared-memory collectives."""
    import deepspeed

    for name in _SHARED_MEMORY:
        deepspeed.ops.__compatible_ops__[name] = False


# State that a run leaves in DeepSpeed's module-level variables and in a cache, which would affect the next run


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
