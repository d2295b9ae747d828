"""Attributes that DeepSpeed sets on parameters that it shards at stage 3."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_INIT = "deepspeed.runtime.zero.partition_parameters.Init"
_UNPREFIXED = ("is_external_param", "nvme_swapper")

_ALL_GATHER = PrivateName(
    name=f"{_INIT}.all_gather",
    purpose="to gather parameters in this run's process group although an earlier run has sharded them, and to detect "
    "when DeepSpeed gathers one",
    reason="DeepSpeed sets the process group once, when it shards a parameter, and has no hook for gathering",
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
                "no public name gives the offset of a shard, and functions of deepspeed.zero gather full parameters",
                (
                    *("ds_id", "ds_status", "ds_tensor", "ds_shape", "ds_numel"),
                    *("ds_zero_partition_rank", "ds_zero_partition_world_size"),
                ),
            ),
            (
                "to gather parameters in this run's process group although an earlier run has sharded them",
                "DeepSpeed sets the process group once, when it shards a parameter",
                ("ds_process_group", "ds_active_sub_modules"),
            ),
            (
                "to know which parameters DeepSpeed keeps gathered between steps",
                "the configuration gives a threshold, but not the parameters that are below it",
                ("ds_persist",),
            ),
            (
                "to detect when DeepSpeed gathers and releases parameters",
                "DeepSpeed has no hook for gathering and releasing",
                ("all_gather_coalesced", "partition"),
            ),
            (
                "to restore parameters as they were before the run",
                "engine.destroy does not remove these attributes",
                _UNPREFIXED,
            ),
        )
        for name in names
    ),
)


def join_group(parameter: Any, group: Any) -> None:
    """Set the process group of a sharded `parameter`, even if an exception has left it marked as in use."""
    from deepspeed.runtime.zero.partition_parameters import Init

    parameter.ds_process_group = group
    parameter.ds_active_sub_modules.clear()
    # The parameter's methods are closures over the `zero.Init` that sharded it.
    cells = [cell.cell_contents for cell in parameter.all_gather.__closure__ or ()]
    inits = [each for each in cells if isinstance(each, Init)]
    if not inits:
        raise _ALL_GATHER.error("it is not a closure over the zero.Init that sharded the parameter")
    for init in inits:
        init.ds_process_group = group


def is_from_deepspeed(name: str, value: Any) -> bool:
    """Return whether DeepSpeed, and not user code, has set attribute `name` of a sharded parameter to `value`."""
    return (
        name.startswith(("ds_", "_ds_"))
        or name in _UNPREFIXED
        or str(getattr(value, "__module__", "")).startswith("deepspeed")
    )
