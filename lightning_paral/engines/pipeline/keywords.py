"""The keywords of `ParalPipelineStrategy`, with their documentation."""

from collections.abc import Sequence
from dataclasses import fields

from lightning_paral.engines.pipeline.options import Balance, PipelineOptions
from lightning_paral.engines.pipeline.schedule import Schedule
from lightning_paral.options import RankOptions, UnitChoice, takes_options


class PipelineKeywords(RankOptions, total=False):
    """The keywords of `ParalPipelineStrategy`: those of the pipeline, and those of `RankOptions`.

    Args:
        stages: the number of stages. The world size divided by it is the number of ranks per stage, which draw
            different samples. `None`: as many as there are ranks.
        micro_batches: the number of parts into which each training batch is divided; fewer if it has fewer samples. A
            stage is idle for (stages - 1) / (micro_batches + stages - 1) of a step. `None`: four for each stage.
        schedule: `"1f1b"` keeps the activations of at most as many micro-batches as there are stages, `"gpipe"` those
            of all. Both take the same time.
        balance: how the units are divided: `"params"` gives the stages similar numbers of parameters; `"time"` gives
            them similar numbers of floating-point operations of matrix products, convolutions, attention and LSTMs in
            a training step, with what follows the last unit, which are counted on the first batch without running it;
            a list has the number of units of each stage. Outside of a fit, `"time"` divides by parameters.
        units: the submodules that form the chain: `"auto"`, which finds repeated blocks; classes or their names; or a
            function that takes a submodule's dotted name and the submodule, and returns whether to choose it. All other
            parameters are on every rank, except those of `first_stage` and `last_stage`.
        min_params: instead of `units`, the smallest submodules with at least this number of parameters.
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
    """

    stages: int | None
    micro_batches: int | None
    schedule: Schedule
    balance: Balance
    units: UnitChoice
    min_params: int | None
    check_steps: bool
    broadcast_buffers: bool
    shard: bool | int
    first_stage: Sequence[str]
    last_stage: Sequence[str]


takes_pipeline_options = takes_options(
    PipelineKeywords, {field.name: field.default for field in fields(PipelineOptions)}
)
"""Decorate a constructor that takes `**keywords: Unpack[PipelineKeywords]`: its signature lists each of them."""
