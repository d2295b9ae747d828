"""What a rank holds of the weights under FSDP, for averages of them: the local tensors of DTensors."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.checkpoint.lazy_tensor import read_chunk, read_into
from lightning_paral.checkpoint.shards import chunk_of_dtensor


class ShardedWeights:
    """The parameters of a sharded `module`: `WeightShards` of averages."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]

    def prepare(self) -> None:
        """Reshard gathered parameters, so that what was written to them is in the shards."""
        for part in self._parts:
            part.reshard()

    def current(self) -> list[Tensor]:
        """Return the local tensors of DTensors, and what is not sharded whole."""
        self.prepare()  # an evaluation with reshard_after_forward=False leaves parameters gathered
        with torch.no_grad():
            return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self._module.parameters()]

    def publish(self, *, borrowed: bool) -> None:
        """Do nothing: what is gathered next is gathered from the shards."""

    def keep(self) -> None:
        """Do nothing: there are no other copies."""

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average as a DTensor placed as the parameter is, or whole where that is."""
        parameter = self._parameter(number)
        if not isinstance(parameter, DTensor):
            return average
        return cast(
            "Tensor",
            DTensor.from_local(
                average,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
        )

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Fill an average with its part of `stored`."""
        parameter = self._parameter(number)
        if not isinstance(parameter, DTensor):
            read_into(stored, average)
            return
        chunk = chunk_of_dtensor(parameter)
        if chunk is not None and chunk.numel:
            read_chunk(stored, chunk, average)

    def has_master(self, number: int) -> bool:
        """Return `False`."""
        return False

    def _parameter(self, number: int) -> Any:
        return list(self._module.parameters())[number]
