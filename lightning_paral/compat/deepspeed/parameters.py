"""What DeepSpeed sets on parameters that it shards at stage 3."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_INIT = "deepspeed.runtime.zero.partition_parameters.Init"
_GIVEN = ("is_external_param", "nvme_swapper")

_ALL_GATHER = PrivateName(
    name=f"{_INIT}.all_gather",
    purpose="to let parameters that an earlier run has sharded gather in this run's process group, and to notice "
    "when DeepSpeed gathers one",
    reason="DeepSpeed shards a parameter once, for one process group, and has no hook for gathering",
    seen="deepspeed 0.19.8",
    on_instances=True,
)
NAMES = (
    _ALL_GATHER,
    *(
        PrivateName(name=f"{_INIT}.{name}", purpose=purpose, reason=reason, seen="deepspeed 0.19.8", on_instances=True)
        for purpose, reason, names in (
            (
                "to know this rank's shard of a parameter, its full shape, and whether it is gathered",
                "no public name says where a shard begins, and the functions of deepspeed.zero gather full parameters",
                (
                    *("ds_id", "ds_status", "ds_tensor", "ds_shape", "ds_numel"),
                    *("ds_zero_partition_rank", "ds_zero_partition_world_size"),
                ),
            ),
            (
                "to let parameters that an earlier run has sharded gather in this run's process group",
                "DeepSpeed shards a parameter once, for one process group",
                ("ds_process_group", "ds_active_sub_modules"),
            ),
            (
                "to notice when DeepSpeed gathers and releases parameters",
                "DeepSpeed has no hook for it",
                ("all_gather_coalesced", "partition"),
            ),
            (
                "to restore parameters as they were before the run",
                "engine.destroy leaves its attributes on them",
                _GIVEN,
            ),
        )
        for name in names
    ),
)


def join_group(parameter: Any, group: Any) -> None:
    """Let a sharded `parameter` gather in `group`, even if a failure has left it in use."""
    from deepspeed.runtime.zero.partition_parameters import Init

    parameter.ds_process_group = group
    parameter.ds_active_sub_modules.clear()
    # Its methods are closures over the `zero.Init` that made it.
    cells = [cell.cell_contents for cell in parameter.all_gather.__closure__ or ()]
    makers = [each for each in cells if isinstance(each, Init)]
    if not makers:
        raise _ALL_GATHER.error("it is no closure over the zero.Init that made the parameter")
    for maker in makers:
        maker.ds_process_group = group


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Whether DeepSpeed, and not user code, has set an attribute of a parameter that was built sharded."""
    return (
        name.startswith(("ds_", "_ds_"))
        or name in _GIVEN
        or str(getattr(value, "__module__", "")).startswith("deepspeed")
    )
