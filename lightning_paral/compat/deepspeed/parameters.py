"""What DeepSpeed gives to parameters that it divides at stage 3."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_INIT = "deepspeed.runtime.zero.partition_parameters.Init"
_PART = "to know this rank's part of a parameter, its true shape, and whether it is whole now"
_NO_PART = "nothing public tells where a part begins, and deepspeed.zero functions gather whole parameters"
_GIVEN = ("is_external_param", "nvme_swapper")

NAMES = (
    *(
        PrivateName(name=f"{_INIT}.{name}", purpose=_PART, reason=_NO_PART, seen="deepspeed 0.19.8", on_instances=True)
        for name in (
            *("ds_id", "ds_status", "ds_tensor", "ds_shape", "ds_numel"),
            *("ds_zero_partition_rank", "ds_zero_partition_world_size"),
        )
    ),
    *(
        PrivateName(
            name=f"{_INIT}.{name}",
            purpose="to let parameters that an earlier run has divided gather in the process group of this one",
            reason="DeepSpeed divides a parameter once, for one process group",
            seen="deepspeed 0.19.8",
            on_instances=True,
        )
        for name in ("ds_process_group", "ds_active_sub_modules", "all_gather")
    ),
    *(
        PrivateName(
            name=f"{_INIT}.{name}",
            purpose="to give parameters back as they were before DeepSpeed took them",
            reason="engine.destroy leaves what it has set on them",
            seen="deepspeed 0.19.8",
            on_instances=True,
        )
        for name in _GIVEN
    ),
)


def join_group(parameter: Any, group: Any) -> None:
    """Let a divided `parameter` gather in `group`, also if a failure has left it in use."""
    from deepspeed.runtime.zero.partition_parameters import Init

    parameter.ds_process_group = group
    parameter.ds_active_sub_modules.clear()
    # Its methods are closures over the `zero.Init` that made it.
    cells = [cell.cell_contents for cell in parameter.all_gather.__closure__ or ()]
    makers = [each for each in cells if isinstance(each, Init)]
    if not makers:
        raise NAMES[-3].error("it is no closure over the zero.Init that made the parameter")
    for maker in makers:
        maker.ds_process_group = group


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Whether an attribute of a parameter that was built divided is DeepSpeed's, and not of code of the user's."""
    return (
        name.startswith(("ds_", "_ds_"))
        or name in _GIVEN
        or str(getattr(value, "__module__", "")).startswith("deepspeed")
    )
