"""DeepSpeed: its state in a process, what stage 3 sets on modules, its operators, its optimizers and their masters."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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
    "deepspeed.runtime.base_optimizer.ZeROOptimizer": {
        "clear_backward_seen_flag": "begin a further backward pass after the same forward pass",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "finalize_gradient_accumulation_boundary": "end an accumulation window after its last backward pass",
        "scaled_global_norm": "read the norm of gradients before the step that clips them",
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        "loss_scale": "know the scale of losses and gradients",
        "_link_all_hp_params": "link parameters to their masters again after the optimizer's groups have changed",
        ".bit16_groups": "know which parameters share a flat master",
        ".single_partition_of_fp32_groups": "read and write this rank's flat masters without a collective",
        ".parallel_partitioned_bit16_groups": "share the memory of fp32 weights, and gather averages of weights",
        ".real_dp_process_group": "share the memory of fp32 weights, and gather averages of weights",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".clip_grad": "clip gradients by the norm that Lightning passes for each step",
        "_get_norm_groups": "read the norm of gradients before the step that clips them",
        ".fp16_partitioned_groups_flat": "let fp32 masters share the memory of fp32 weights",
        ".fp16_groups": "read and write this rank's fp32 weights and their states",
        ".fp32_partitioned_groups_flat": "read and write this rank's fp32 weights and their states",
        "_reassign_or_swap_out_partitioned_parameters": "make forward use weights that have been written",
        "_swappable_optimizer_subgroup(sub_group_id)": "hold a sub-group in memory while it is read",
        "_optimizer_states_and_gradient_swap_in(sub_group_id)": "hold a sub-group in memory while it is read",
        "_optimizer_states_and_gradient_swap_out(sub_group_id)": "hold a sub-group in memory while it is read",
        "_release_swap_buffers(sub_group_id)": "hold a sub-group in memory while it is read",
    },
}


# The variables of its modules in which a process keeps what a run needs


def use_backend(backend: Any) -> None:
    """Make DeepSpeed run its collectives through `backend`; `None` removes the current backend."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


def forget_runs() -> None:
    """Forget what earlier runs have left: backend, process groups, modules, running forward passes, and counters.

    Groups of ZeRO++ stay until the default group is destroyed. Counters start at 0, because stage 3 compares the
    numbers of modules and parameters between ranks, which may have taken part in different runs.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import groups

    use_backend(None)
    if is_alive(groups._WORLD_GROUP):  # otherwise it was destroyed with an earlier default group
        dist.destroy_process_group(groups._WORLD_GROUP)
    groups._release_process_group_references()
    FWD_MODULE_STACK.clear()
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)  # a mutable default counts modules
    decorated: Any = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    within = [decorated, *(cell.cell_contents for cell in getattr(decorated, "__closure__", None) or ())]
    caches = [each for each in within if hasattr(each, "cache_clear")]
    if not caches:
        raise named(NAMES, "_PartitionedParameterCoordinator__params_to_release").error("its decorators have no cache")
    for each in caches:
        each.cache_clear()


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


# Attributes that DeepSpeed sets at stage 3

_UNPREFIXED = ("is_external_param", "applied_pre_backward_ref_cnt", "_external_params", "_original_parameters")


def is_zero_attribute(name: str) -> bool:
    """Return whether `name` is an attribute that stage 3 sets on parameters that it shards, or on their modules."""
    return name.startswith(("ds_", "_ds_")) or name in _UNPREFIXED


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Return whether DeepSpeed, not user code, has set attribute `name` of a parameter or module to `value`."""
    return is_zero_attribute(name) or str(getattr(value, "__module__", "")).startswith("deepspeed")


def innermost_forward() -> Module | None:
    """Return the module whose forward is running, or `None`."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # Each engine puts its module at the bottom of the stack when it is created, and leaves it there.
    innermost: Module | None = FWD_MODULE_STACK[-1] if len(FWD_MODULE_STACK) > 1 else None
    return innermost


# Dictionaries of parameters, which it replaces


def restore_container(module: Module) -> None:
    """Replace DeepSpeed's dictionary of the parameters of `module` with one of the class that it had before."""
    original: Any = vars(module).pop("_original_parameters", None)
    if original is not None:
        # Copy the items, because DeepSpeed's dictionary gathers a parameter that is read by key.
        plain = type(original)(own_parameters(module).items())
        del module._parameters
        module._parameters = plain


# The optimizers of stages 1 and 2, and of stage 3


def scaled_norm(optimizer: Any, stage: int) -> Tensor:
    """Return the global 2-norm of the averaged gradients, in fp32 and multiplied by the loss scale. *Collective*."""
    if stage < 3:
        return torch.as_tensor(optimizer.scaled_global_norm()).float()
    squares = torch.stack([norm.float() ** 2 for norm in optimizer._get_norm_groups()])
    return squares.sum().sqrt()


# Flat fp32 master weights of several parameters: of each group, or of each sub-group at stage 3

Masters = tuple[list[Any], Tensor, Tensor | None]
"""Parameters, their flat master on this rank, and the flat weights with the same elements. The master is empty while it
is on NVMe; the weights are `None` if they are there."""


def all_masters(optimizer: Any, stage: int) -> list[Masters]:
    """Return all masters with what belongs to each. At stages 1 and 2, parameters are views of the weights."""
    if stage == 3:
        flat = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat
        return list(zip(optimizer.fp16_groups, *flat, strict=True))
    of_ranks = zip(optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True)
    own = [shards[dist.get_rank(group)] for shards, group in of_ranks]
    return list(zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, own, strict=True))


def share_masters(optimizer: Any, stage: int) -> None:
    """Let the masters of `optimizer` share the memory of the weights that they are equal to: fp32 weights.

    Saves 4 bytes per element of this rank's shard. DeepSpeed copies masters to weights after a step, which then changes
    nothing. Masters on another device than the weights, and those of an offloaded optimizer, stay apart.
    """
    shared = False
    for _, master, weights in all_masters(optimizer, stage):
        kind = (master.dtype, master.device, master.shape)
        if weights is not None and (weights.dtype, weights.device, weights.shape) == kind:
            master.data = weights.detach()
            shared = True
    if shared and stage < 3:
        optimizer._link_all_hp_params()


def gather_weights(optimizer: Any) -> None:
    """Give every rank of stage 1 or 2 the weights of which another rank has the masters. *Collective*."""
    for shards, group in zip(optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True):
        dist.all_gather(shards, shards[dist.get_rank(group)], group=group)


def copy_masters_to_parameters(optimizer: Any, index: int) -> None:
    """Copy the masters of a sub-group of stage 3 to its parameters."""
    optimizer._reassign_or_swap_out_partitioned_parameters(index)


def is_on_nvme(optimizer: Any, index: int) -> bool:
    """Return whether the masters and states of a sub-group of stage 3 are on NVMe between steps."""
    return bool(optimizer._swappable_optimizer_subgroup(index))


def swap_in(optimizer: Any, index: int) -> None:
    """Read a sub-group from NVMe: its masters and all of its state."""
    optimizer._optimizer_states_and_gradient_swap_in(index)


def swap_out(optimizer: Any, index: int, *, write: bool) -> None:
    """Free the memory of a sub-group, after writing it back to NVMe if `write`."""
    if write:
        optimizer._optimizer_states_and_gradient_swap_out(index)
    else:
        optimizer._release_swap_buffers(index)
