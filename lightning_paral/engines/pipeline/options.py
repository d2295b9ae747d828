"""The options of `ParalPipelineStrategy`, and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_paral.distributed.mesh import ParallelDims, check_divides
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import Positive
from lightning_paral.options import ADVICE_ON_UNITS, RankOptions, UnitChoice, check_unit_choice
from lightning_paral.planning.layout import Layout

Schedule = Literal["1f1b", "gpipe", "interleaved"]
Balance = Literal["params"] | Sequence[Positive]
MICRO_BATCHES_PER_STAGE = 4
"""With this number, a stage waits for less than a fifth of a step (Huang et al., arXiv:1811.06965)."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(RankOptions):
    """The options of `ParalPipelineStrategy`.

    Args:
        stages: the number of stages. The world size divided by it is the number of ranks per stage, which draw
            different samples. `None`: as many as there are ranks.
        micro_batches: the number of parts into which each training batch is divided; fewer if it has fewer samples. A
            stage is idle for (stages - 1) / (micro_batches + stages - 1) of a step. `None`: four for each stage.
        schedule: `"1f1b"` keeps the activations of at most as many micro-batches as there are stages, `"gpipe"` those
            of all. Both take the same time. `"interleaved"` is 1F1B with two parts of the chain per stage: with 2
            stages, the first one has the first and the third quarter of the units. A stage waits for about half the
            time, keeps more activations, and sends and receives them twice.
        balance: how the units are divided: `"params"` gives the stages similar numbers of parameters; a list has the
            number of units of each stage, with `schedule="interleaved"` those of each part, in their order.
        units: the submodules that form the chain: `"auto"`, which finds repeated blocks; classes or their names; or a
            function that takes a submodule's dotted name and the submodule, and returns whether to choose it. All other
            parameters are on every rank, except those of `first_stage` and `last_stage`.
        check_steps: before the first training step, and after 1, 2 and 4 optimizer steps, run `training_step` on
            samples of the batch, and check that dividing the module and the batch does not change what it computes.
        broadcast_buffers: give all ranks of a stage the buffers of the first of them, as DDP does: before the training
            step that begins an accumulation window, and at the start of validation.
        shard: the number of ranks of a stage over which its parameters, gradients and optimizer state are sharded with
            FSDP2; it must divide the ranks per stage. `True`: all of them. `False`: none; each holds its whole stage.
            Parameters outside of the units are sharded as well. All are unsharded once per step, not per micro-batch.
        first_stage: the dotted names of submodules outside of the units that only the first stage holds, such as an
            embedding. Only the first unit may use what they return.
        last_stage: the dotted names of submodules that only the last stage holds, such as a head. They may be called
            after the last unit only.
        tensor_parallel: the number of ranks of a stage that compute each layer together: each has some of the features.
            They are consecutive, and draw the same samples.
        plan: with `tensor_parallel`, the layers to split, as in `ParalFSDPStrategy`.
        check_plan: with `tensor_parallel`, compare the loss and the gradients of two samples with those of the unsplit
            module before the first training step, unless one rank lacks memory for the whole module.

    Raises:
        ConfigurationError: an option has an invalid value, or options contradict each other.
    """

    stages: Positive | None = None
    micro_batches: Positive | None = None
    schedule: Schedule = "1f1b"
    balance: Balance = "params"
    units: UnitChoice = "auto"
    check_steps: bool = True
    broadcast_buffers: bool = True
    shard: bool | Positive = False
    first_stage: Sequence[str] = ()
    last_stage: Sequence[str] = ()
    tensor_parallel: Positive = 1
    plan: Literal["auto"] | dict[str, str] = "auto"
    check_plan: bool = True

    advice = RankOptions.advice | ADVICE_ON_UNITS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit_choice(self.units)
        if self.tensor_parallel == 1 and self.plan != "auto":
            raise ConfigurationError(
                "plan=... says which layers are split over tensor ranks, but tensor_parallel=1. Set tensor_parallel to "
                "the number of ranks that compute each layer together, such as 2."
            )
        if isinstance(self.balance, str):
            return
        per_stage, num_parts = self.parts_per_stage, len(self.balance)
        if num_parts == 0 or num_parts % per_stage or self.stages not in (None, num_parts // per_stage):
            raise ConfigurationError(
                f"balance={list(self.balance)!r} divides the units among {num_parts} parts, but stages={self.stages}, "
                f"of {per_stage} part(s) each. Give one number for each part."
            )

    @property
    def parts_per_stage(self) -> int:
        """The number of parts of the chain that each of several stages has."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        return "paral_pp" if self.tensor_parallel == 1 else "paral_pp_tp"

    @property
    def layout(self) -> Layout:
        """How a plan counts the strategy."""
        return Layout(
            strategy=self.strategy_name,
            engine="pipeline",
            stages=self.stages,
            tensor=self.tensor_parallel,
            micro_batches=self.micro_batches,
            parts_per_stage=self.parts_per_stage,
            recomputes=self.activation_checkpointing is not None,
        )

    def num_stages(self, world_size: int) -> int:
        """Return the number of stages of `world_size` ranks; by default the length of `balance`, or as many as fit."""
        if self.stages is not None:
            return self.stages
        if isinstance(self.balance, str):
            return world_size // self.tensor_parallel
        return len(self.balance) // self.parts_per_stage

    def num_micro_batches(self, world_size: int) -> int:
        """Return the largest number of parts into which a batch is divided."""
        return self.micro_batches or MICRO_BATCHES_PER_STAGE * self.num_stages(world_size)

    def arrange(self, rank: int, world_size: int) -> ParallelDims:
        """Return the arrangement of `world_size` ranks; `check_world_size` has found that it is possible."""
        stages = self.num_stages(world_size)
        per_stage = world_size // (stages * self.tensor_parallel)
        shard = (per_stage if self.shard else 1) if isinstance(self.shard, bool) else self.shard
        return ParallelDims(
            rank=rank, pipeline=stages, replicate=per_stage // shard, shard=shard, tensor=self.tensor_parallel
        )

    def check_world_size(self, world_size: int) -> None:
        """Raise a `ConfigurationError` if `world_size` ranks cannot be divided into the stages, and these into shards.

        One rank may shard over itself, so that a configuration also works on one device.
        """
        tensor = self.tensor_parallel
        check_divides(f"tensor_parallel={tensor}", tensor, world_size, "ranks", "1 splits no layers")
        stages = self.num_stages(world_size)
        groups = "ranks" if tensor == 1 else f"groups of tensor_parallel={tensor} ranks"
        hint = "the ranks of a stage draw different samples"
        check_divides(f"stages={stages}", stages, world_size // tensor, groups, hint)
        per_stage = world_size // (stages * tensor)
        if self.shard is True and per_stage == 1 and world_size > 1:
            raise ConfigurationError(
                f"shard=True shards each stage over its ranks, but with {stages} stages on {world_size} ranks, each "
                "stage has one rank. Set stages to a smaller number, or leave shard out."
            )
        if not isinstance(self.shard, bool):
            of, hint = f"rank(s) of each of the {stages} stage(s)", "True means all of them, False not at all"
            check_divides(f"shard={self.shard}", self.shard, per_stage, of, hint)
