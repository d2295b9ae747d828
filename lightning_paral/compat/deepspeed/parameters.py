"""Attributes that DeepSpeed sets on parameters that it shards at stage 3."""

from typing import Any

from lightning_paral.compat.private_name import Names, named

_UNPREFIXED = ("is_external_param", "nvme_swapper")

NAMES: Names = {
    "deepspeed.runtime.zero.partition_parameters.Init": {
        ".all_gather": "gather in this run's process group, also what an earlier run has sharded",
        ".ds_id": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_status": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_tensor": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_shape": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_numel": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_zero_partition_rank": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_zero_partition_world_size": "know this rank's shard, its full shape, and whether it is gathered",
        ".ds_process_group": "gather in this run's process group, also what an earlier run has sharded",
        ".ds_active_sub_modules": "gather in this run's process group, also what an earlier run has sharded",
        ".ds_persist": "know which parameters DeepSpeed keeps gathered between steps",
        ".all_gather_coalesced": "detect when DeepSpeed gathers and releases parameters",
        ".partition": "detect when DeepSpeed gathers and releases parameters",
        ".is_external_param": "restore parameters as they were before the run",
        ".nvme_swapper": "restore parameters as they were before the run",
    },
}


def join_group(parameter: Any, group: Any) -> None:
    """Set the process group of a sharded `parameter`, even if an exception has left it marked as in use."""
    from deepspeed.runtime.zero.partition_parameters import Init

    parameter.ds_process_group = group
    parameter.ds_active_sub_modules.clear()
    # The parameter's methods are closures over the `zero.Init` that sharded it.
    cells = [cell.cell_contents for cell in parameter.all_gather.__closure__ or ()]
    inits = [each for each in cells if isinstance(each, Init)]
    if not inits:
        raise named(NAMES, "all_gather").error("it is not a closure over the zero.Init that sharded the parameter")
    for init in inits:
        init.ds_process_group = group


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Return whether DeepSpeed, and not user code, has set attribute `name` of a sharded parameter to `value`."""
    return (
        name.startswith(("ds_", "_ds_"))
        or name in _UNPREFIXED
        or str(getattr(value, "__module__", "")).startswith("deepspeed")
    )
