"""What `paral bench step` reports, and how it follows from the measured turns."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from lightning_paral.diagnostics.bench.raw_loop import RAW

_FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ddp": (("raw_ddp",), ("ddp",)),
    "fsdp": (("raw_fsdp", "raw_fsdp_direct"), ("fsdp",)),
    "zero1": (("raw_zero1",), ("deepspeed_stage_1",)),
    "zero2": (("raw_zero2",), ("deepspeed_stage_2",)),
    "zero3": (("raw_zero3",), ("deepspeed_stage_3",)),
}
"""Hand-written loops, and Lightning's own strategy, by a part of the names of the strategies on the same engine."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """The steps of one strategy."""

    strategy: str
    seconds: float
    """The median time from the end of a step to the end of the next, over all rounds and ranks."""
    num_steps: int
    samples_per_second: float
    """Of all ranks together."""
    start_seconds: float
    """From the creation of the Trainer, or of the hand-written loop, to the end of the first step."""
    peak_host_bytes: int
    """The peak of resident memory of a process, imports included: the largest of all ranks."""
    peak_device_bytes: int | None
    """The peak of memory that torch has allocated on the GPU: the largest of all ranks. `None` on the CPU."""
    sent_bytes: float
    """What a rank sends through sockets in a step, the largest of all ranks. NCCL within a node uses no sockets."""
    ratio_to_raw: float | None
    """The time divided by that of the hand-written loop on the same engine; `None` if that was not measured."""
    ratio_to_lightning: float | None
    """The time divided by that of Lightning's own strategy on the same engine; `None` if that was not measured."""


@dataclass(frozen=True, kw_only=True)
class StepResults:
    """The result of `paral bench step`."""

    num_ranks: int
    module: str
    num_params: int
    batch_size: int
    """Samples of a batch of one rank."""
    rows: tuple[StepRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def summarize_steps(turns: dict[str, list[list[dict[str, Any]]]], num_ranks: int) -> StepResults:
    """Return the results of all strategies.

    Args:
        turns: by strategy, what each rank reported at the end of each turn; the first turn is that of the start.
        num_ranks: the number of ranks of each strategy.
    """
    rows = []
    about = next(iter(turns.values()))[0][0]
    seconds = {
        name: median(taken for turn in found[1:] for rank in turn for taken in rank["seconds"])
        for name, found in turns.items()
    }
    for name, (first, *measured) in turns.items():
        last = measured[-1]
        raw, lightning = ((), ()) if name in RAW else _references(name)
        device_peaks = [rank["peak_device_bytes"] for rank in last]
        rows.append(
            StepRow(
                strategy=name,
                seconds=seconds[name],
                num_steps=sum(len(turn[0]["seconds"]) for turn in measured),
                samples_per_second=num_ranks * about["batch_size"] / seconds[name],
                start_seconds=max(rank["seconds"][0] for rank in first),
                peak_host_bytes=max(rank["peak_host_bytes"] for rank in last),
                peak_device_bytes=None if None in device_peaks else max(device_peaks),
                sent_bytes=max(median(turn[rank]["sent_bytes"] for turn in measured) for rank in range(num_ranks)),
                ratio_to_raw=_ratio(seconds, name, raw),
                ratio_to_lightning=_ratio(seconds, name, lightning),
            )
        )
    return StepResults(
        num_ranks=num_ranks,
        module=about["module"],
        num_params=max(turn[0]["num_params"] for found in turns.values() for turn in found),
        batch_size=about["batch_size"],
        rows=tuple(rows),
    )


def _ratio(seconds: dict[str, float], name: str, references: tuple[str, ...]) -> float | None:
    """Return the time of `name` divided by that of the first of the `references` that was measured."""
    found = [reference for reference in references if reference in seconds and reference != name]
    return seconds[name] / seconds[found[0]] if found else None


def _references(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return next((references for part, references in _FAMILIES.items() if part in name), ((), ()))
