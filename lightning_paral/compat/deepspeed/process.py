"""DeepSpeed in a process: its backend, operators, module-level state, and what stage 3 sets on modules."""

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from lightning_paral.compat.private_name import Names, named
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.process_groups import is_alive

NAMES: Names = {
    "deepspeed.comm.comm": {
        "cdb": "run DeepSpeed's collectives through our own backend, and to remove it after a run",
    },
    "deepspeed.utils.groups": {
        "_WORLD_GROUP": "destroy the process group that a run has left behind",
        "_release_process_group_references(group)": "make DeepSpeed forget its destroyed process groups",
    },
    "deepspeed.ops.op_builder.builder.OpBuilder": {
        "_loaded_ops": "let DeepSpeed find operators that have been compiled once",
    },
    "deepspeed.ops": {"__compatible_ops__": "keep DeepSpeed from compiling shared-memory collectives (deepspeed#7625)"},
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator": {
        "_PartitionedParameterCoordinator__params_to_release": "empty it: it would keep modules and engines alive",
    },
    "deepspeed.runtime.zero.partition_parameters.Init": {
        ".all_gather": "gather what a forward or backward pass uses",
        ".ds_id": "know which parameters are of stage 3",
        ".ds_status": "know whether a parameter is gathered",
        ".ds_tensor": "read and write this rank's shard",
        ".ds_shape": "know the full shape of a parameter",
        ".ds_numel": "know the full size of a parameter, and that of its shard with padding",
        ".ds_zero_partition_rank": "know where this rank's shard begins",
        ".convert_to_zero_parameters": "shard one parameter after the other",
        ".partition": "notice what user code has written before it is dropped",
        "param_id": "make all ranks number parameters equally after different earlier runs",
        ".is_external_param": "restore parameters as they were before the run",
    },
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus": {
        "AVAILABLE": "know whether a parameter is gathered",
        "NOT_AVAILABLE": "know whether a parameter is gathered",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "FWD_MODULE_STACK": "know which module uses another's parameter; empty the list after a failure",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": {
        "_register_deepspeed_module(module, count)": "number modules equally on all ranks (`count` is mutable)",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module": {
        ".applied_pre_backward_ref_cnt": "remove it after a run: it would call or keep the destroyed engine",
    },
    "deepspeed.runtime.zero.parameter_offload._inject_parameters": {
        "._original_parameters": "remove it after a run: it would call or keep the destroyed engine",
    },
    "deepspeed.runtime.zero.partition_parameters._init_external_params": {
        "._external_params": "remove it after a run: it would call or keep the destroyed engine",
    },
}


# The backend that runs DeepSpeed's collectives, which is a module-level variable of DeepSpeed


def make_backend(cls: Any, name: str) -> Any:
    """Return an instance of `cls`, a subclass of `TorchBackend`, for torch's backend `name` and the default group."""
    return cls(name, timedelta(0), None)  # the group exists, so the timeout has no effect


def use_backend(backend: Any) -> None:
    """Make DeepSpeed run its collectives through `backend`; `None` removes the current backend."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


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


# Attributes that DeepSpeed sets at stage 3

_UNPREFIXED = ("is_external_param", "applied_pre_backward_ref_cnt", "_external_params", "_original_parameters")


def is_zero_attribute(name: str) -> bool:
    """Return whether `name` is an attribute that stage 3 sets on parameters that it shards, or on their modules."""
    return name.startswith(("ds_", "_ds_")) or name in _UNPREFIXED


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Return whether DeepSpeed, not user code, has set attribute `name` of a parameter or module to `value`."""
    return is_zero_attribute(name) or str(getattr(value, "__module__", "")).startswith("deepspeed")


# The counters with which stage 3 numbers modules and parameters


def restart_counters() -> None:
    """Number the next module and the next parameter 0 on every rank, whatever runs the ranks took part in before.

    DeepSpeed compares the numbers between ranks, but never resets them in a process.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)  # a mutable default counts modules


def innermost_forward() -> Module | None:
    """Return the module whose forward is running, or `None`."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # Each engine puts its module at the bottom of the stack when it is created, and leaves it there.
    innermost: Module | None = FWD_MODULE_STACK[-1] if len(FWD_MODULE_STACK) > 1 else None
    return innermost


def forget_forwards() -> None:
    """Empty the stack of modules whose forward is running, as if every forward had returned."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    FWD_MODULE_STACK.clear()


# Dictionaries of parameters, which it replaces


def restore_container(module: Module, cls: type) -> None:
    """Replace DeepSpeed's dictionary of the parameters of `module` with a dictionary of class `cls`."""
    current: Any = own_parameters(module)
    if type(current) is not cls:
        # Copy the items, because DeepSpeed's dictionary gathers a parameter that is read by key.
        plain = cls(current.items())
        del module._parameters
        module._parameters = plain
