"""What the memory of a rank should be: the planner's prediction, and a limit by formula.

The formula counts model states as Rajbhandari et al. do ("ZeRO", arXiv:1910.02054, section 3.1), with the optimizer
states that the module's own optimizer creates.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_paral.diagnostics.bench.names import check_names
from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.diagnostics.bench.raw_loop import RAW
from lightning_paral.diagnostics.bench.task import make_task
from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.batch import first_batch
from lightning_paral.planning.estimate import rank_memory
from lightning_paral.planning.following import follow_steps
from lightning_paral.planning.layout import LAYOUTS, Layout, layouts_of
from lightning_paral.planning.memory.model_states import model_state_bytes
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.timeline import Kind, Timeline

SLACK = 1.25
"""How much more than the formula the limit of sharded strategies has for model states."""
_SAME_LAYOUT = {
    "ddp": "paral_ddp",
    "raw_ddp": "paral_ddp",
    "fsdp": "paral_fsdp",
    "raw_fsdp": "paral_fsdp",
    "raw_fsdp_direct": "paral_fsdp",
    **{f"raw_zero{stage}": f"paral_zero{stage}" for stage in (1, 2, 3)},
    **{f"deepspeed_stage_{stage}": f"paral_zero{stage}" for stage in (1, 2, 3)},
    "deepspeed_stage_2_offload": "paral_zero2_offload",
    "deepspeed_stage_3_offload": "paral_zero3_offload",
}
"""The strategy of this package that shards the same states, by the names of Lightning's strategies and of the loops."""
KNOWN = tuple(dict.fromkeys((*(layout.strategy for layout in LAYOUTS if layout.engine != "dp"), *_SAME_LAYOUT, *RAW)))
"""Names of strategies whose model states the formula knows."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a strategy should need on a rank, in bytes."""

    formula_bytes: int
    """Weights, gradients and optimizer states."""
    limit_bytes: int
    """`SLACK` times the formula, the largest unit, and what autograd saves."""
    planned_bytes: int
    """The peak that the planner predicts."""
    is_sharded: bool
    """Whether some of the model states are divided among ranks."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained, and what each strategy should need for it."""

    module: str
    num_params: int
    batch_size: int
    """Samples of a batch of one rank."""
    unit_bytes: int
    """The parameters of the largest unit."""
    activation_bytes: int
    """What autograd saves for the backward pass."""
    notes: tuple[str, ...]
    """What the planner assumed."""
    expected: dict[int, dict[str, Expected]]
    """By number of ranks and name of strategy."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Subject":
        """Return what `as_json` has made."""
        expected = {
            int(num_ranks): {name: Expected(**each) for name, each in strategies.items()}
            for num_ranks, strategies in record["expected"].items()
        }
        return cls(**(record | {"expected": expected, "notes": tuple(record["notes"])}))


def check_memory_strategies(names: Sequence[str]) -> None:
    """Check the names of strategies.

    Raises:
        ConfigurationError: one occurs twice, or the formula does not know what it shards.
    """
    check_names("--strategies", names, KNOWN)
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"--strategies names {name!r} twice.")


def layout_of(name: str) -> Layout:
    """Return the layout that the planner has for a strategy or a loop from `KNOWN`."""
    (layout,) = layouts_of([_SAME_LAYOUT.get(name, name)])
    return layout


def predict(
    rank: Rank, *, strategies: Sequence[str], num_ranks: Sequence[int], config: str | None, overrides: Sequence[str]
) -> dict[str, Any]:
    """Follow a step of the module without running it, and return a `Subject` for JSON.

    Args:
        rank: the only rank of a new process.
        strategies: names from `KNOWN`.
        num_ranks: numbers of ranks.
        config: as in `make_task`.
        overrides: as in `make_task`.

    Raises:
        ConfigurationError: the module or the data cannot be made, or the module does not take the data.
    """
    task = make_task(config, overrides)
    given = task.trainer_options
    settings = StepSettings(
        precision=str(given.get("precision") or "32-true"), clip_value=given.get("gradient_clip_val")
    )
    batch = first_batch(task.module, task.data)
    followed = follow_steps(task.module, batch, settings, task.data)
    states, timeline = followed.states, followed.plain
    unit = max(sum(states.parameters[number].num_bytes for number in each.parameters) for each in timeline.units)
    saved = saved_bytes(timeline)
    expected = {}
    for count in num_ranks:
        on_cpu = torch.cuda.device_count() < count
        expected[count] = {
            name: expect(layout_of(name), timeline, states, count, settings, unit + saved, on_cpu=on_cpu)
            for name in strategies
        }
    subject = Subject(
        module=type(task.module).__name__,
        num_params=states.num_params,
        batch_size=extract_batch_size(batch),
        unit_bytes=unit,
        activation_bytes=saved,
        notes=timeline.notes,
        expected=expected,
    )
    return asdict(subject)


def expect(
    layout: Layout,
    timeline: Timeline,
    states: ModelStates,
    num_ranks: int,
    settings: StepSettings,
    extra_bytes: int,
    *,
    on_cpu: bool,
) -> Expected:
    """Return what a layout should need on a rank.

    Args:
        layout: the strategy.
        timeline: a step with the batch of one rank.
        states: the states of the module, unsharded.
        num_ranks: the number of ranks.
        settings: the Trainer's settings.
        extra_bytes: what the limit allows beside model states: the largest unit, and activations.
        on_cpu: whether the device is the CPU.
    """
    formula = sum(model_state_bytes(layout, states, num_ranks, settings).values())
    return Expected(
        formula_bytes=round(formula),
        limit_bytes=round(SLACK * formula + extra_bytes),
        planned_bytes=rank_memory(layout, timeline, states, num_ranks, settings, on_cpu=on_cpu).peak_bytes,
        is_sharded=layout.engine in ("fsdp", "zero"),
    )


def saved_bytes(timeline: Timeline) -> int:
    """Return the bytes that exist when the backward pass begins, beside model states: what autograd has saved."""
    now = 0
    for moment in timeline.moments:
        if moment.kind is Kind.BACKWARD:
            break
        if moment.kind in (Kind.ACTIVATION, Kind.CAST):
            now += moment.size
    return max(0, now) if timeline.has_activations else 0
