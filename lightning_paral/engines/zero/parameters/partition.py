"""Parameters that DeepSpeed has partitioned at stage 3: their full shapes, and this rank's shards of them.

A partitioned parameter keeps this rank's shard beside an empty `data`; while it is gathered, `data` is full as well.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.checkpoint.lazy_tensor import materialize, read_flat_range
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.deepspeed import parameter_files
from lightning_paral.compat.deepspeed.modules import end_forward
from lightning_paral.compat.deepspeed.parameters import join_group
from lightning_paral.errors import ConfigurationError


def is_stage3_parameter(parameter: Any) -> bool:
    """Whether DeepSpeed has partitioned `parameter`; it may be gathered now."""
    return hasattr(parameter, "ds_id")


def is_partitioned(parameter: Any) -> bool:
    """Whether this rank has only its shard of `parameter` now: it is of stage 3, and not gathered."""
    return is_stage3_parameter(parameter) and parameter.ds_status.name == "NOT_AVAILABLE"


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the full shape of a parameter or buffer, partitioned or not."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def full_numel(parameter: Any) -> int:
    """Return the number of elements of the full parameter, partitioned or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def count_trained(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements of all full parameters that require a gradient."""
    return sum(full_numel(parameter) for parameter in parameters if parameter.requires_grad)


def local_flat_range(parameter: Any) -> tuple[int, int]:
    """Return start and length of this rank's shard of a flattened parameter of stage 3, without padding."""
    share = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_numel, share * parameter.ds_zero_partition_rank)
    return start, min(share, parameter.ds_numel - start)


def local_shard(parameter: Any) -> Tensor:
    """Return this rank's shard of a parameter of stage 3: 1-dimensional, without padding, not copied."""
    _, numel = local_flat_range(parameter)
    shard: Tensor = parameter.ds_tensor.data[:numel]
    return shard


# Weights without a master copy: frozen ones, and all of them outside of training


def read_partition(parameter: Any) -> Tensor:
    """Return this rank's shard of `parameter` for a checkpoint, or all of a parameter that is not partitioned."""
    if not is_stage3_parameter(parameter):
        full: Tensor = parameter.detach()
        return full
    start, numel = local_flat_range(parameter)

    def read() -> Tensor:
        with parameter_files.in_memory(parameter, write=False):
            return local_shard(parameter).clone()

    return FlatShard(parameter.ds_shape, parameter.dtype, start, numel, read)


def write_partition(parameter: Any, full: Tensor) -> bool:
    """Copy this rank's shard of the `full` tensor into `parameter`; return `False` if it is not partitioned."""
    if not is_stage3_parameter(parameter):
        return False
    start, _ = local_flat_range(parameter)
    with parameter_files.in_memory(parameter, write=True):
        read_flat_range(full, start, local_shard(parameter))
    write_gathered(parameter, full)
    return True


def write_partitions(written: list[tuple[Parameter, Tensor]]) -> None:
    """Copy this rank's shards of full tensors into those parameters that are partitioned."""
    for parameter, full in written:
        write_partition(parameter, full)


def write_gathered(parameter: Any, full: Tensor) -> None:
    """Copy the `full` tensor into a parameter of stage 3 that is gathered now, as small ones are between steps."""
    if not is_partitioned(parameter):
        parameter.data.copy_(materialize(full).view(parameter.data.shape))


def is_stored_in(folder: Path, parameter: Any) -> bool:
    """Whether this rank's shard of `parameter` is in a file below `folder`, and not in memory."""
    on_nvme = is_partitioned(parameter) and parameter_files.is_in_file_only(parameter)
    return on_nvme and parameter_files.folder_of(parameter).is_relative_to(folder)


# What modules need before DeepSpeed partitions them, or after it has


@contextmanager
def show_full_shapes(module: Module) -> Iterator[None]:
    """Let partitioned parameters show their full shapes, with NaN as values and without using memory.

    DeepSpeed leaves an empty tensor in their place. `parameter.dim() > 1`, by which many models sort parameters into
    groups of the optimizer, would be false for all of them.
    """
    parameters: list[Any] = [parameter for parameter in module.parameters() if is_partitioned(parameter)]
    hidden = [(parameter, parameter.data) for parameter in parameters]
    for parameter, empty in hidden:
        parameter.data = empty.new_full((), torch.nan).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter, empty in hidden:
            parameter.data = empty


class _ScalarsAsBytes(TorchFunctionMode):
    """Let scalars be viewed as bytes, which torch refuses and DeepSpeed does to broadcast a parameter."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view and len(args) == 2 and args[1] is torch.uint8 and args[0].dim() == 0:
            args = (args[0].view(1), torch.uint8)
        return func(*args, **(kwargs or {}))


def view_scalars_as_bytes() -> TorchFunctionMode:
    """Return a context in which DeepSpeed can broadcast 0-dimensional parameters."""
    return _ScalarsAsBytes()


def make_contiguous(parameter: Any) -> None:
    """Lay out a full `parameter` row by row: DeepSpeed sends and partitions its bytes in this order."""
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()


def check_not_empty(module: Module) -> None:
    """Raise a `ConfigurationError` if a parameter has no elements: stage 3 would wait for it forever."""
    for name, parameter in module.named_parameters():
        if full_numel(parameter) == 0:
            raise ConfigurationError(
                f"ZeRO stage 3 cannot shard a parameter without elements, and {name!r} has shape "
                f"{full_shape(parameter)}. Leave it out (`None` in its place), make it a buffer, or use paral_zero2."
            )


def rejoin(module: Module) -> None:
    """Attach parameters that an earlier run has partitioned to the process group of this one.

    Forwards that a failure of that run interrupted are marked as ended.

    Raises:
        ConfigurationError: they were partitioned among another number of ranks.
    """
    from deepspeed.comm import get_rank, get_world_group, get_world_size

    partitioned: list[Any] = [parameter for parameter in module.parameters() if is_stage3_parameter(parameter)]
    for part in module.modules():
        end_forward(part)
    for parameter in partitioned:
        if parameter.ds_zero_partition_world_size != get_world_size() or parameter.ds_zero_partition_rank != get_rank():
            raise ConfigurationError(
                f"{type(module).__name__} was partitioned by a run with {parameter.ds_zero_partition_world_size} ranks "
                f"and is now used with {get_world_size()}. Use as many, or load a checkpoint into a new module."
            )
        join_group(parameter, get_world_group())
