"""Files on NVMe that hold a rank's shards of stage-3 parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": {
        "PartitionedParamStatus": "know whether a shard is in memory",
    },
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper": {
        "swap_in(params, async_op)": "read and write a shard without an fp32 master",
        "swap_out_and_release(params)": "read and write a shard without an fp32 master",
        "remove_partition_and_release_buffers(params)": "read and write a shard without an fp32 master",
        ".swap_folder": "keep files that hold the only copy of a parameter",
    },
}


def has_file(parameter: Any) -> bool:
    """Return whether this rank's shard of `parameter` has a file on NVMe."""
    return getattr(parameter, "nvme_swapper", None) is not None


def is_in_file_only(parameter: Any) -> bool:
    """Return whether this rank's shard of `parameter` is only in its file, and not in memory."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    return has_file(parameter) and parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE


def folder_of(parameter: Any) -> Path:
    """Return the folder that contains the file of `parameter`, which must have one."""
    return Path(parameter.nvme_swapper.swap_folder)


@contextmanager
def in_memory(parameter: Any, *, write: bool) -> Iterator[None]:
    """Keep this rank's shard of `parameter` in memory inside this context; if `write`, write changes to its file."""
    swapped = is_in_file_only(parameter)
    if swapped:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    yield
    if swapped and write:
        parameter.nvme_swapper.swap_out_and_release([parameter])
    elif swapped:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
