"""The options of `ParalFSDPStrategy` that concern sharding, and their checks."""

from dataclasses import dataclass
from typing import Literal

from lightning_paral.distributed.mesh import check_replicate, check_reshard
from lightning_paral.engines.fsdp.precision import DTYPES, ReduceDtype
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import check_at_least
from lightning_paral.options import UnitChoice, check_unit_choice


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

    def __post_init__(self) -> None:
        check_unit_choice(self.units, self.min_params)
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

    def check_world_size(self, world_size: int) -> None:
        """Raise a `ConfigurationError` if `world_size` ranks cannot be arranged as the options specify."""
        check_replicate(self.replicate, world_size)
        check_reshard(self.reshard_after_forward, world_size // self.replicate)
