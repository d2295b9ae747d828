"""Stage 3: sharded parameters and their files, `zero.Init`, and what it sets on modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from lightning_paral.compat.deepspeed.runtime import answering_rank
from lightning_paral.compat.private_name import Names, named
from lightning_paral.compat.torch.modules import forward_hooks, own_parameters

NAMES: Names = {
    "deepspeed.runtime.zero.partition_parameters.Init": {
        ".all_gather": "gather what user code or a backward pass uses",
        ".ds_id": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_status": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_tensor": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_shape": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_numel": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_zero_partition_rank": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_persist": "know which parameters DeepSpeed keeps gathered between steps",
        ".convert_to_zero_parameters": "shard one parameter after the other",
        ".partition": "detect when DeepSpeed gathers and releases parameters",
        ".is_external_param": "restore parameters as they were before the run",
        ".nvme_swapper": "know whether a shard is in memory",
        ".status": "know whether a shard is in memory",
        "param_id": "make all ranks number parameters equally after different earlier runs",
    },
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus": {
        "AVAILABLE": "know whether a parameter is gathered",
        "NOT_AVAILABLE": "know whether a parameter is gathered",
        "INFLIGHT": "know whether a parameter is gathered",
    },
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper": {
        "swap_in(params, async_op)": "read and write a shard without an fp32 master",
        "swap_out_and_release(params)": "read and write a shard without an fp32 master",
        "remove_partition_and_release_buffers(params)": "read and write a shard without an fp32 master",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": {
        "_register_deepspeed_module(module, count)": "number modules equally on all ranks (`count` is mutable)",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "FWD_MODULE_STACK": "know which module uses another's parameter; empty the list after a failure",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module": {
        ".applied_pre_backward_ref_cnt": "remove it after a run: it would call or keep the destroyed engine",
        "._post_forward_module_hook": "let modules return objects of any type (deepspeed#7442)",
    },
    "deepspeed.runtime.zero.parameter_offload._inject_parameters": {
        "._original_parameters": "remove it after a run: it would call or keep the destroyed engine",
    },
    "deepspeed.runtime.zero.partition_parameters._init_external_params": {
        "._external_params": "remove it after a run: it would call or keep the destroyed engine",
    },
}


# Attributes that DeepSpeed sets at stage 3

_UNPREFIXED = ("is_external_param", "applied_pre_backward_ref_cnt", "_external_params", "_original_parameters")


def is_zero_attribute(name: str) -> bool:
    """Return whether `name` is an attribute that stage 3 sets on parameters that it shards, or on their modules."""
    return name.startswith(("ds_", "_ds_")) or name in _UNPREFIXED


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Return whether DeepSpeed, not user code, has set attribute `name` of a parameter or module to `value`."""
    return is_zero_attribute(name) or str(getattr(value, "__module__", "")).startswith("deepspeed")


# Files on NVMe that hold a rank's shards of stage-3 parameters


def is_in_file_only(parameter: Any) -> bool:
    """Return whether this rank's shard of `parameter` is only in its file, and not in memory."""
    has_file = getattr(parameter, "nvme_swapper", None) is not None
    return has_file and parameter.ds_tensor.status.name == "NOT_AVAILABLE"


@contextmanager
def in_memory(parameter: Any, *, write: bool) -> Iterator[None]:
    """Keep this rank's shard of `parameter` in memory inside this context; if `write`, write changes to its file."""
    if not is_in_file_only(parameter):
        yield
        return
    with answering_rank():
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
        yield
        if write:
            parameter.nvme_swapper.swap_out_and_release([parameter])
        else:
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


# The counters with which stage 3 numbers modules and parameters


def restart_counters() -> None:
    """Number the next module and the next parameter 0 on every rank, whatever runs the ranks took part in before.

    DeepSpeed compares the numbers between ranks, but never resets them in a process.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)  # a mutable default counts modules


# The modules whose forward is running at stage 3, kept in a module-level list of DeepSpeed


def innermost_forward() -> Module | None:
    """Return the module whose forward is running, or `None`."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # Each engine puts its module at the bottom of the stack when it is created, and leaves it there.
    innermost: Module | None = FWD_MODULE_STACK[-1] if len(FWD_MODULE_STACK) > 1 else None
    return innermost


def forget_forwards() -> None:
    """Empty the stack, as if every forward had returned."""
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


# The hooks in which stage 3 looks for parameters among the outputs of modules


def show_outputs_as(module: Module, view: Callable[[Any], Any]) -> None:
    """Pass `view(output)` instead of the output to DeepSpeed's hooks on `module` and its submodules.

    Args:
        module: the module of a stage-3 engine.
        view: called with the output of a module; returns the object to pass.
    """
    root_has_one, *_ = [_replace(part, view) for part in module.modules()]
    if not root_has_one:
        raise named(NAMES, "_post_forward_module_hook").error(
            f"the engine has registered no hook of that name on {type(module).__name__}"
        )


def _replace(part: Module, view: Callable[[Any], Any]) -> bool:
    hooks = forward_hooks(part)
    found = [key for key, hook in hooks.items() if _looks_for_parameters(hook)]
    for key in found:
        hooks[key] = _with_view(hooks[key], view)
    return bool(found)


def _looks_for_parameters(hook: Any) -> bool:
    # DeepSpeed wraps the hook in a function for profiling, which has a different name.
    functions = [hook, *(cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())]
    return any(getattr(function, "__name__", "") == "_post_forward_module_hook" for function in functions)


def _with_view(hook: Callable[..., Any], view: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(module: Module, inputs: Any, output: Any) -> None:
        hook(module, inputs, view(output))

    return run
