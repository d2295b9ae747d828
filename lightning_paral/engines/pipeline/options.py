"""The options of `ParalPipelineStrategy`, and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.schedule import Schedule
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import check_at_least
from lightning_paral.options import UnitChoice, check_unit_choice

Balance = Literal["params", "time"] | Sequence[int]
MICRO_BATCHES_PER_STAGE = 4
"""With this number, a stage waits for less than a fifth of a step (Huang et al., arXiv:1811.06965)."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options for dividing a module into stages and training it; `ParalPipelineStrategy` documents each.

    Raises:
        ConfigurationError: an option has an invalid value, or options contradict each other.
    """

    stages: int | None = None
    micro_batches: int | None = None
    schedule: Schedule = "1f1b"
    balance: Balance = "params"
    units: UnitChoice = "auto"
    min_params: int | None = None
    check_steps: bool = True
    broadcast_buffers: bool = True
    shard: bool | int = False
    first_stage: Sequence[str] = ()
    last_stage: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_unit_choice(self.units, self.min_params)
        if self.schedule not in ("1f1b", "gpipe"):
            raise ConfigurationError(f"schedule={self.schedule!r} is not known. Choose '1f1b' or 'gpipe'.")
        for option in ("stages", "micro_batches"):
            check_at_least("ParalPipelineStrategy", option, getattr(self, option), 1)
        for option in ("first_stage", "last_stage"):
            names = getattr(self, option)
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ConfigurationError(f"{option}={names!r} must be a list of names of submodules, such as ['head'].")
        if not isinstance(self.shard, bool):
            check_at_least("ParalPipelineStrategy", "shard", self.shard, 1)
        if isinstance(self.balance, str):
            if self.balance not in ("params", "time"):
                raise ConfigurationError(
                    f"balance={self.balance!r} is not known. Choose 'params' or 'time', or give the number of units of "
                    "each stage, such as [3, 5]."
                )
        elif not self.balance or any(type(size) is not int or size < 1 for size in self.balance):
            raise ConfigurationError(
                f"balance={list(self.balance)!r} must have the number of units of each stage, each at least 1, such as "
                "[3, 5]."
            )
        elif self.stages is not None and len(self.balance) != self.stages:
            raise ConfigurationError(
                f"balance={list(self.balance)!r} divides the units among {len(self.balance)} stages, but "
                f"stages={self.stages}. Give one number for each stage."
            )

    def num_stages(self, world_size: int) -> int:
        """Return the number of stages of `world_size` ranks; by default the length of `balance`, or one per rank."""
        if self.stages is not None:
            return self.stages
        return world_size if isinstance(self.balance, str) else len(self.balance)

    def num_micro_batches(self, world_size: int) -> int:
        """Return the largest number of parts into which a batch is divided."""
        return self.micro_batches or MICRO_BATCHES_PER_STAGE * self.num_stages(world_size)

    def arrange(self, rank: int, world_size: int) -> ParallelDims:
        """Return the arrangement of `world_size` ranks; `check_world_size` has found that it is possible."""
        stages = self.num_stages(world_size)
        per_stage = world_size // stages
        shard = (per_stage if self.shard else 1) if isinstance(self.shard, bool) else self.shard
        return ParallelDims(rank=rank, pipeline=stages, replicate=per_stage // shard, shard=shard)

    def check_world_size(self, world_size: int) -> None:
        """Raise a `ConfigurationError` if `world_size` ranks cannot be divided into the stages, and these into shards.

        One rank may shard over itself, so that a configuration also works on one device.
        """
        stages = self.num_stages(world_size)
        if world_size % stages:
            fitting = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
            raise ConfigurationError(
                f"{'stages' if self.stages else 'balance'} gives {stages} stages, which does not divide the "
                f"{world_size} ranks: {world_size} / {stages} = {world_size / stages:.2f} ranks per stage. Choose one "
                f"of {', '.join(fitting)} stages; the ranks of a stage draw different samples."
            )
        per_stage = world_size // stages
        if self.shard is True and per_stage == 1 and world_size > 1:
            raise ConfigurationError(
                f"shard=True shards each stage over its ranks, but with {stages} stages on {world_size} ranks, each "
                "stage has one rank. Set stages to a smaller number, or leave shard out."
            )
        if not isinstance(self.shard, bool) and per_stage % self.shard:
            fitting = [str(count) for count in range(1, per_stage + 1) if per_stage % count == 0]
            raise ConfigurationError(
                f"shard={self.shard} does not divide the {per_stage} rank(s) of each of the {stages} stage(s). Choose "
                f"one of {', '.join(fitting)}, or True (over all ranks of a stage) or False (not at all)."
            )
