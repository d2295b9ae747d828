"""DeepSpeed's backend, operators and module-level state."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lightning_paral.compat.private_name import Names, named
from lightning_paral.compat.torch.process_groups import all_gather_single, is_alive, reduce_scatter_single

NAMES: Names = {
    "deepspeed.comm.comm": {
        "cdb": "run DeepSpeed's collectives through our own backend, and to remove it after a run",
    },
    "deepspeed.comm.torch.TorchBackend": {
        ".all_gather_function": "call torch's collective under its current name, which raises no warning",
        ".reduce_scatter_function": "call torch's collective under its current name, which raises no warning",
        "reduce": "override it with an implementation for gloo",
        "reduce_scatter_tensor": "override it with an implementation for gloo",
        "all_reduce": "override it with an implementation for gloo",
        "all_gather_into_tensor": "override it with an implementation for gloo",
        ".shm_comm_op": "check that shared-memory collectives are disabled",
    },
    "deepspeed.utils.groups": {
        "_WORLD_GROUP": "destroy the process group that a run has left behind",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "destroy the process group that a run has left behind",
        "_ALL_TO_ALL_GROUP": "destroy the process group that a run has left behind",
        "_release_process_group_references(group)": "make DeepSpeed forget its destroyed process groups",
    },
    "deepspeed.ops.op_builder.builder.OpBuilder": {
        "jit_load(verbose)": "compile an operator without importing it",
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


def use_new_names(backend: Any) -> None:
    """Make `backend` call single-tensor collectives under their current names in torch.

    A filter could not ignore these warnings only where DeepSpeed causes them: torch attributes them to its own file.
    """
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single


# Process groups that DeepSpeed creates on demand, and keeps in module-level variables


def release_groups() -> None:
    """Destroy DeepSpeed's process groups that still exist, and make it forget all of them."""
    from deepspeed.utils import groups

    made = (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, *groups._ALL_TO_ALL_GROUP.values())
    for group in made:
        if is_alive(group):  # otherwise it was destroyed with an earlier default group
            dist.destroy_process_group(group)
    groups._release_process_group_references()


# The information that DeepSpeed reads about the processor


@contextmanager
def cache_cpu_info() -> Iterator[None]:
    """Inside this context, make DeepSpeed's CPU optimizers read the processor's vendor only once per process.

    Each `DeepSpeedCPUAdam` (0.19.8) reads it with `cpuinfo`, which starts a process and takes a second.
    """
    import cpuinfo

    read = cpuinfo.get_cpu_info
    cpuinfo.get_cpu_info = _cpu_info
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = read


@cache
def _cpu_info() -> Any:
    from cpuinfo.cpuinfo import get_cpu_info

    return get_cpu_info()


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


def check_shared_memory_disabled(backend: Any) -> None:
    """Raise a `PrivateNameError` if `backend` has compiled shared-memory collectives."""
    if backend.shm_comm_op is not None:
        raise named(NAMES, "__compatible_ops__").error("it no longer disables them")


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
