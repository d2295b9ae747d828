"""Parameters without an fp32 master copy: frozen ones, and all of them outside of training."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_paral.checkpoint.lazy_tensor import materialize, read_flat_range
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.deepspeed.parameter_files import in_memory
from lightning_paral.engines.zero.parameters.partition import is_partitioned, run_of_partition


def held(parameter: Any) -> Tensor:
    """Return what this rank has of `parameter` as it is computed with."""
    if not hasattr(parameter, "ds_id"):
        whole: Tensor = parameter.detach()
        return whole
    start, numel = run_of_partition(parameter)

    def read() -> Tensor:
        with in_memory(parameter, write=False):
            values: Tensor = parameter.ds_tensor.data[:numel]
            return values.clone()

    return FlatShard(parameter.ds_shape, parameter.dtype, start, numel, read)


def fill(parameter: Any, stored: Tensor) -> bool:
    """Put a stored tensor into a partitioned `parameter`; `False` if it is whole."""
    if not hasattr(parameter, "ds_id"):
        return False
    start, numel = run_of_partition(parameter)
    with in_memory(parameter, write=True):
        read_flat_range(stored, start, parameter.ds_tensor.data[:numel])
    fill_gathered(parameter, stored)
    return True


def fill_all(written: list[tuple[Parameter, Tensor]]) -> None:
    """Put whole values into parameters of which this rank may hold a part."""
    for parameter, values in written:
        fill(parameter, values)


def fill_gathered(parameter: Any, stored: Tensor) -> None:
    """Put a stored tensor into the whole values of a parameter of stage 3, if it is kept whole between steps."""
    if not is_partitioned(parameter):  # small ones are
        parameter.data.copy_(materialize(stored).view(parameter.data.shape))
