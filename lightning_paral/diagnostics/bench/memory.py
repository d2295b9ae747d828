"""`paral bench memory`: the peak of memory of a rank under several strategies, beside a limit and the planner's.

Each strategy runs in new processes, one after the other, so that each has a peak of its own.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from lightning_paral.diagnostics.bench import memory_plan, memory_rank
from lightning_paral.diagnostics.bench.memory_plan import Subject
from lightning_paral.diagnostics.bench.ranks import RANK_BYTES, OnProgress, check_free_memory, run_on_ranks

DEFAULT_STRATEGIES = (
    "ddp",
    "paral_ddp",
    "paral_zero1",
    "paral_zero2",
    "paral_zero3",
    "raw_zero3",
    "paral_fsdp",
    "raw_fsdp",
)
DEFAULT_RANKS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One strategy on one number of ranks. Sizes are those of the rank that needs the most, in bytes."""

    strategy: str
    num_ranks: int
    device: str
    """`"cpu"`: resident memory, less what imports take. `"cuda"`: memory that torch has allocated on the GPU."""
    start_bytes: int
    """The peak until the first step begins."""
    peak_bytes: int
    """The peak of construction and steps."""
    start_seconds: float
    """From `fit()` to the begin of the first step, on the slowest rank."""
    formula_bytes: int
    """Weights, gradients and optimizer states, by the formula of the ZeRO paper."""
    limit_bytes: int
    """1.25 times the formula, the largest unit, and what autograd saves."""
    planned_bytes: int
    """The peak that `paral plan` predicts."""
    is_sharded: bool

    @property
    def planned_ratio(self) -> float:
        """The planned peak divided by the measured one."""
        return self.planned_bytes / max(1, self.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryResults:
    """The result of `paral bench memory`."""

    module: str
    num_params: int
    batch_size: int
    """Samples of a batch of one rank."""
    unit_bytes: int
    activation_bytes: int
    notes: tuple[str, ...]
    """What the planner assumed."""
    rows: tuple[MemoryRow, ...]

    def above_limit(self) -> list[MemoryRow]:
        """Return the rows of sharded strategies of this package whose peak is above the limit."""
        return [row for row in self._sharded() if row.peak_bytes > row.limit_bytes]

    def above_ddp(self) -> list[MemoryRow]:
        """Return the rows of sharded strategies of this package that need more than DDP on as many ranks."""
        peaks: dict[int, int] = {}
        for row in self.rows:
            if row.strategy in ("ddp", "paral_ddp", "raw_ddp"):
                peaks[row.num_ranks] = min(row.peak_bytes, peaks.get(row.num_ranks, row.peak_bytes))
        return [row for row in self._sharded() if row.peak_bytes > peaks.get(row.num_ranks, row.peak_bytes)]

    def _sharded(self) -> list[MemoryRow]:
        return [row for row in self.rows if row.is_sharded and row.strategy.startswith("paral_")]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        rows = [asdict(row) | {"planned_ratio": row.planned_ratio} for row in self.rows]
        return asdict(self) | {"rows": rows}


def measure_memory(
    strategies: Sequence[str],
    *,
    config: str | None,
    overrides: Sequence[str] = (),
    num_ranks: Sequence[int],
    timeout: timedelta,
    on_progress: OnProgress | None = None,
) -> MemoryResults:
    """Measure the peaks.

    Args:
        strategies: names from `memory_plan.KNOWN`.
        config: the path of a LightningCLI configuration; `None` for the small Transformer.
        overrides: options that change the configuration, such as `["--model.width", "1024"]`.
        num_ranks: numbers of ranks.
        timeout: how long to wait for each strategy.
        on_progress: called with what is being measured.

    Raises:
        ConfigurationError: a strategy cannot train the module, or the host has too little memory.
        RankFailedError: a rank failed.
    """
    arguments = {"config": config, "overrides": list(overrides)}
    if on_progress is not None:
        on_progress("predicting")
    (record,) = run_on_ranks(
        f"{memory_plan.__name__}:{memory_plan.predict.__name__}",
        arguments | {"strategies": list(strategies), "num_ranks": list(num_ranks)},
        num_ranks=1,
        timeout=timeout,
    )
    subject = Subject.from_json(record)
    check_memory(subject)
    rows = []
    for count in num_ranks:
        for name in strategies:
            if on_progress is not None:
                on_progress(f"{name} on {count} {'rank' if count == 1 else 'ranks'}")
            found = run_on_ranks(
                f"{memory_rank.__name__}:{memory_rank.run_and_measure.__name__}",
                arguments | {"strategy": name},
                num_ranks=count,
                timeout=timeout,
                name=name,
            )
            most = {key: max(rank[key] for rank in found) for key in ("start_bytes", "peak_bytes", "start_seconds")}
            expected = asdict(subject.expected[count][name])
            rows.append(MemoryRow(strategy=name, num_ranks=count, device=found[0]["device"], **most, **expected))
    return MemoryResults(
        module=subject.module,
        num_params=subject.num_params,
        batch_size=subject.batch_size,
        unit_bytes=subject.unit_bytes,
        activation_bytes=subject.activation_bytes,
        notes=subject.notes,
        rows=tuple(rows),
    )


def check_memory(subject: Subject) -> None:
    """Check that the strategy that needs the most host memory fits into what is free.

    Raises:
        ConfigurationError: it does not.
    """
    needs = {
        (num_ranks, name): num_ranks * (RANK_BYTES + expected.planned_bytes)
        for num_ranks, strategies in subject.expected.items()
        for name, expected in strategies.items()
    }
    num_ranks, name = max(needs, key=lambda each: needs[each])
    check_free_memory(
        f"{name} on {num_ranks} ranks",
        needs[num_ranks, name],
        "Give fewer --ranks or a smaller model, or leave it out.",
    )
