"""The options of `ParalFSDPStrategy` that concern sharding, and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_paral.distributed.mesh import ParallelDims, check_replicate, check_reshard
from lightning_paral.engines.fsdp.precision import DTYPES, ReduceDtype
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import check_at_least
from lightning_paral.options import UnitChoice, check_unit_choice

TensorParallel = int | Literal["node"]


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """Options for sharding and training a module; `ParalFSDPStrategy` documents each.

    Raises:
        ConfigurationError: an option has an invalid value, or options contradict each other.
    """

    units: UnitChoice = "auto"
    min_params: int | None = None
    replicate: int = 1
    reshard_after_forward: bool | int | None = None
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    prefetch: int | None = None
    offload: bool = False
    reduce_dtype: ReduceDtype | None = None
    broadcast_buffers: bool = True
    tensor_parallel: TensorParallel = 1
    plan: Literal["auto"] | Mapping[str, str] = "auto"
    sequence_parallel: bool = False
    check_plan: bool = True

    def __post_init__(self) -> None:
        check_unit_choice(self.units, self.min_params)
        self._check_tensor_parallel()
        if self.accumulate not in ("sharded", "unsharded"):
            raise ConfigurationError(f"accumulate={self.accumulate!r} is not known. Choose 'sharded' or 'unsharded'.")
        if self.prefetch is not None and self.prefetch < 1:
            raise ConfigurationError(
                f"prefetch={self.prefetch!r} has to be at least 1, or None for FSDP2's own choice."
            )
        if self.reduce_dtype not in (None, *DTYPES):
            raise ConfigurationError(
                f"reduce_dtype={self.reduce_dtype!r} is not known. Choose from: {', '.join(map(repr, DTYPES))}."
            )
        if not isinstance(self.reshard_after_forward, bool):
            check_at_least("ParalFSDPStrategy", "reshard_after_forward", self.reshard_after_forward, 1)

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        if self.tensor_parallel == "node":
            return "paral_tp"
        if self.tensor_parallel > 1:
            return "paral_fsdp_tp"
        return "paral_fsdp_offload" if self.offload else "paral_fsdp"

    def _check_tensor_parallel(self) -> None:
        if isinstance(self.tensor_parallel, str):
            if self.tensor_parallel != "node":
                raise ConfigurationError(
                    f"tensor_parallel={self.tensor_parallel!r} is not known. Give the number of ranks that compute "
                    "each layer together, or 'node' for all ranks of a node."
                )
            if self.replicate != 1:
                raise ConfigurationError(
                    f"tensor_parallel='node' holds one copy of the model on each node, so replicate={self.replicate} "
                    "cannot be given as well. Leave replicate out, or give the number of ranks to tensor_parallel."
                )
        else:
            check_at_least("ParalFSDPStrategy", "tensor_parallel", self.tensor_parallel, 1)
        if self.tensor_parallel == 1 and self.plan != "auto":
            raise ConfigurationError(
                "plan=... says which layers are split over tensor ranks, but tensor_parallel=1. Set tensor_parallel to "
                "the number of ranks that compute each layer together, such as 2."
            )
        if self.tensor_parallel == 1 and self.sequence_parallel:
            raise ConfigurationError(
                "sequence_parallel=True divides positions among tensor ranks, but tensor_parallel=1. Set "
                "tensor_parallel to the number of ranks that compute each layer together, such as 2."
            )
        reshards_over_fewer = not (self.reshard_after_forward is None or isinstance(self.reshard_after_forward, bool))
        if self.tensor_parallel != 1 and reshards_over_fewer:
            raise ConfigurationError(
                f"tensor_parallel={self.tensor_parallel!r} and reshard_after_forward={self.reshard_after_forward} "
                "cannot be combined: FSDP2 reshards over fewer ranks only parameters that are not split. Use True or "
                "False."
            )
        if self.tensor_parallel != 1 and self.offload:
            raise ConfigurationError(
                f"tensor_parallel={self.tensor_parallel!r} and offload=True cannot be combined. Leave one of them out."
            )

    def arrange(self, rank: int, world_size: int, ranks_per_node: int) -> ParallelDims:
        """Return the arrangement of `world_size` ranks; `check_world_size` has found that it is possible."""
        if self.tensor_parallel == "node":
            tensor, replicate = ranks_per_node, world_size // ranks_per_node
        else:
            tensor, replicate = self.tensor_parallel, self.replicate
        return ParallelDims(rank=rank, replicate=replicate, shard=world_size // (tensor * replicate), tensor=tensor)

    def check_world_size(self, world_size: int, ranks_per_node: int) -> None:
        """Raise a `ConfigurationError` if `world_size` ranks cannot be arranged as the options specify."""
        tensor = ranks_per_node if self.tensor_parallel == "node" else self.tensor_parallel
        if world_size % tensor:
            fitting = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
            raise ConfigurationError(
                f"tensor_parallel={tensor} does not divide the {world_size} ranks: {world_size} / {tensor} = "
                f"{world_size / tensor:.2f}. Choose one of {', '.join(fitting)}; 1 splits no layers."
            )
        if self.tensor_parallel == "node":
            return
        data_size = world_size // tensor
        if tensor > 1 and (self.replicate < 1 or data_size % self.replicate):
            raise ConfigurationError(
                f"replicate={self.replicate} does not divide the {data_size} groups of tensor_parallel={tensor} ranks. "
                "Choose a number that does; 1 shards over all groups."
            )
        check_replicate(self.replicate, data_size)
        check_reshard(self.reshard_after_forward, data_size // self.replicate)
