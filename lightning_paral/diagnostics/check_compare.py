"""Run the reference and the strategies of a `check`, and find the first value in which they differ."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lightning_paral.diagnostics.check_run import Fit, Item, Raised, Ran, Task, run
from lightning_paral.diagnostics.rank_pool import RankError, RankPool
from lightning_paral.errors import ConfigurationError, ReferenceFailedError
from lightning_paral.strategies.dp import ParalDPStrategy

_KINDS = (
    *("batch", "loss", "gradient norm", "learning rate", "parameter", "buffer"),
    *("log", "validation", "epoch log", "evaluation"),
)
"""The kinds of values in the order of a step, in which the first difference is looked for."""
_LOGGED = ("log", "validation", "epoch log", "evaluation")
_OF_EACH_RANK = ("loss", *_LOGGED)
"""Kinds whose values are means over the samples of a rank, unless ranks reduce them. Their mean is compared."""
_NOISE = 10.0
"""How many times as far from the reference as the run with a rounding error a run may be."""
_NARROW = ("bf16-true", "16-true")
"""Here once as far: a rounding error of a parameter of 16 bits is as large as what many steps change."""
_FLOORS = {"64-true": 1e-9, "32-true": 1e-5}
"""Precision -> the smallest relative difference that counts; 2e-2 if weights or activations have 16 bits."""
_ZERO = 1e-5
"""What is smaller than this part of the largest value of its kind may be zero but for rounding."""
_OF_FP32 = 1e-6
"""A relative difference in fp64 that code which computes in fp32 explains."""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """What came of one strategy."""

    strategy: str
    outcome: Literal["equal", "refused", "differs", "fails"]
    sentence: str = ""
    """Why it is refused, what differs, or the error."""
    precision: str = ""
    """The precision of the runs that were compared; empty if none was."""
    largest: float = 0.0
    """The largest difference, or the first if it counts, relative to the largest value of its tensor."""
    resumed: str = ""
    """Under which strategy, and on how many ranks, the checkpoint was resumed."""
    causes: tuple[str, ...] = ()
    """If it differs: what may be the reason."""

    @property
    def is_allowed(self) -> bool:
        """Whether the strategy equals one process or says that it cannot."""
        return self.outcome in ("equal", "refused")


class Compared(NamedTuple):
    """A value of the reference beside those of the ranks of another run."""

    item: Item
    offs: list[float]
    """How far each rank is from it; infinitely if the value is missing or has another shape."""
    allowed: float
    """What rounding explains."""

    @property
    def wrong(self) -> list[int]:
        """The ranks that differ."""
        return [rank for rank, off in enumerate(self.offs) if not off <= self.allowed]

    @property
    def relative(self) -> float:
        """The largest difference, relative to the largest value of the tensor."""
        return min(max(self.offs) / (abs(self.item.value) or 1.0), sys.float_info.max)  # JSON has no infinity

    def __str__(self) -> str:
        off = max(self.offs)
        size = f"differs by {off:.1e}" if math.isfinite(off) else "is missing, not finite, or has another shape"
        ranks = f"on rank {', '.join(map(str, self.wrong))}" if len(self.wrong) < len(self.offs) else ""
        item = self.item
        return " ".join(filter(None, (f"step {item.step}: {item.kind}", item.name, size, ranks)))


class Reference:
    """What strategies are compared with: a run in one process, and how far rounding may lead from it.

    Args:
        record: the run.
    """

    def __init__(self, record: Ran) -> None:
        self.precision, self.causes = record.precision, record.causes
        # Within a batch, values are compared in the order of a step, whenever they were recorded.
        order = sorted(record.items, key=lambda item: (item.at, _KINDS.index(item.kind)))
        self._values = {item.key: item for item in order}
        self._noise: dict[Any, float] = {}
        self.vary: set[str] = set()
        """The names of logged values that the same code logs differently, such as times."""
        self._largest = dict.fromkeys(_KINDS, 0.0)
        """The largest value of each kind that is not logged: values of other names have other units."""
        for item in order:
            if item.kind not in _LOGGED and math.isfinite(item.value):
                self._largest[item.kind] = max(self._largest[item.kind], abs(item.value))

    def learn_rounding(self, rounded: Ran) -> None:
        """Learn how far rounding may lead, from a run that starts with a rounding error."""
        found = list(self.compared([rounded]))
        if any(each.wrong for each in found if each.item.kind == "batch"):
            return  # it had other data
        largest: dict[Any, float] = {}
        for item, (off,), _ in found:
            name = item.kind, item.name
            largest[name] = self._noise[item.key] = max(largest.get(name, 0.0), off if math.isfinite(off) else 0.0)

    def learn_from_repetition(self, again: Ran) -> list[str]:
        """Learn which logged values vary, from the same run again; return sentences about what is not equal."""
        self.causes = list(dict.fromkeys([*self.causes, *again.causes]))
        unlike = [each for each in self.compared([again]) if each.wrong]
        self.vary = {each.item.name for each in unlike if each.item.kind in _LOGGED}
        told = []
        for each in [each for each in unlike if each.item.kind not in _LOGGED][:1]:
            what = "The data differ between two readings" if each.item.kind == "batch" else "The code is random"
            told.append(f"{what}: two runs in one process from the same seed are not equal. {each}.")
        if self.vary:
            names = ", ".join(sorted(self.vary))
            told.append(f"Not compared, because two runs in one process log different values: {names}.")
        return told

    def compared(self, runs: list[Ran]) -> Iterator[Compared]:
        """Yield the values of the reference, in the order of a step, beside those that the ranks should have."""
        ranks = [{item.key: item for item in each.items} for each in runs]
        start = _start(runs)
        for key, item in self._values.items():
            own = [each[key] for each in ranks if key in each]
            is_before = item.at < start or (start > (0, 0) and item.kind in ("log", "validation", "epoch log"))
            varies = item.kind in _LOGGED and item.name in self.vary
            if is_before or varies or (item.kind == "batch" and not own):  # only one process has whole batches
                continue
            offs = [_distance(each.get(key), item) for each in ranks]
            if item.kind in _OF_EACH_RANK and own:  # a rank may log alone
                offs = [_distance(item._replace(value=sum(each.value for each in own) / len(own)), item)]
            floor = _FLOORS.get(self.precision, 2e-2)
            if item.kind in _LOGGED:
                floor = max(floor, _FLOORS["32-true"])  # metrics stay in fp32
            scale = max(abs(item.value) if math.isfinite(item.value) else 0.0, _ZERO * self._largest[item.kind])
            noise = self._noise.get(key, 0.0) * (1.0 if self.precision in _NARROW else _NOISE)
            yield Compared(item, offs, max(noise, floor * scale))

    def judged(self, label: str, runs: list[Ran]) -> CheckRow:
        """Compare a run under a strategy with the reference."""
        found = list(self.compared(runs))
        row = CheckRow(strategy=label, outcome="equal", precision=self.precision)
        for first in found:
            if first.wrong:
                causes = dict.fromkeys([*self.causes, *(cause for each in runs for cause in each.causes)])
                return replace(
                    row, outcome="differs", sentence=str(first), largest=first.relative, causes=tuple(causes)
                )
        sizes = [
            max(each.offs) / max(abs(each.item.value), _ZERO * self._largest[each.item.kind])
            for each in found
            if each.item.kind not in _LOGGED and any(each.offs)
        ]
        return replace(row, largest=max(sizes, default=0.0))


def _start(runs: list[Ran]) -> tuple[int, int]:
    """Return the first epoch and batch of runs, which are not 0 and 0 if they resume."""
    return min((item.at for each in runs for item in each.items), default=(0, 0))


def _distance(found: Item | None, expected: Item) -> float:
    if found is None:
        return float("inf")
    if found.off is not None:
        return found.off
    if found.value == expected.value or (math.isnan(found.value) and math.isnan(expected.value)):
        return 0.0
    off = abs(found.value - expected.value)
    return float("inf") if math.isnan(off) else off


@dataclass
class Checks:
    """The runs of a `check`, each compared with those in one process, which are made when they are first needed."""

    make: Callable[[], Fit]
    """Returns what to train."""
    task: Task
    """What all runs have in common."""
    pool: RankPool
    timeout: float = 300.0
    """Seconds after which a run counts as hanging."""
    progress: Callable[[str], object] = str
    """Is called with what runs next."""
    precisions: tuple[bool, ...] = (True, False)
    """Whether to train in fp64, in the order of the attempts; `False` is the precision of the project."""
    notes: list[str] = field(default_factory=list)
    """What the runs up to now have shown of the project itself."""
    _references: dict[bool, Reference | Raised] = field(default_factory=dict)

    def row(self, label: str, strategy: Callable[[], Any], ranks: int, saves: bool = True) -> CheckRow:
        """Train under what `strategy` returns, and save half way if `saves`.

        Raises:
            ReferenceFailedError: the run in one process fails.
        """
        row: CheckRow | None = None
        for in_float64 in self.precisions:
            reference = self._reference(in_float64)
            if isinstance(reference, Raised):
                continue
            self.progress(f"{label} on {ranks} ranks")
            path = self.task.folder / f"{label}.ckpt" if saves else None
            row = self._judged(label, reference, self._run(strategy, ranks, in_float64, save_to=path))
            is_of_fp32 = in_float64 and row.outcome == "differs" and row.largest < _OF_FP32
            if row.outcome != "refused" and not is_of_fp32:  # in fp64, it may be refused for the precision
                return row
        if row is None:
            assert isinstance(reference, Raised)
            raise ReferenceFailedError(f"The run in one process, with strategy='auto', failed: {reference.sentence}")
        return row

    def resumed(self, row: CheckRow, loader: str, strategy: Callable[[], Any], ranks: int) -> CheckRow:
        """Resume from the checkpoint of an equal row under another strategy; return the row with what came of it."""
        in_float64 = row.precision == "64-true"
        self.progress(f"{row.strategy}, resumed under {loader}")
        runs = self._run(strategy, ranks, in_float64, resume_from=self.task.folder / f"{row.strategy}.ckpt")
        if not isinstance(runs, Raised) and _start(runs) == (0, 0):
            runs = Raised("no resume: it trained from the beginning")
        found = self._judged(row.strategy, self._reference(in_float64), runs)
        how = f"resumed under {loader} on {ranks} rank{'s' if ranks > 1 else ''}"
        if found.outcome == "equal":
            return replace(row, largest=max(row.largest, found.largest), resumed=how)
        return replace(found, sentence=f"equal until {how}: {found.sentence}")

    def _judged(self, label: str, reference: Any, runs: list[Ran] | Raised) -> CheckRow:
        if not isinstance(runs, Raised):
            return reference.judged(label, runs)  # type: ignore[no-any-return]
        outcome: Literal["refused", "fails"] = "refused" if runs.is_refusal else "fails"
        return CheckRow(strategy=label, outcome=outcome, sentence=runs.sentence)

    def _reference(self, in_float64: bool) -> Reference | Raised:
        if in_float64 not in self._references:
            self.progress("one process")
            replace(self.task, in_float64=in_float64).reference.mkdir()
            self._references[in_float64] = self._made_reference(in_float64)
        return self._references[in_float64]

    def _made_reference(self, in_float64: bool) -> Reference | Raised:
        record = self._run_alone(in_float64, is_reference=True)
        if isinstance(record, Raised):
            return record
        if not record.num_steps:
            return Raised("no step: no optimizer step was taken")
        if record.num_steps < self.task.steps and not self.notes:
            self.notes.append(f"One process ended after {record.num_steps} of {self.task.steps} optimizer steps.")
        made = Reference(record)
        first = next((each for each in self._references.values() if isinstance(each, Reference)), None)
        if first is not None:
            made.vary, made.causes = first.vary, first.causes
        elif isinstance(again := self._run_alone(in_float64), Ran):
            self.notes += made.learn_from_repetition(again)
        if not in_float64 and isinstance(rounded := self._run_alone(in_float64, is_rounded=True), Ran):
            made.learn_rounding(rounded)
        return made

    def _run_alone(self, in_float64: bool, **how: Any) -> Ran | Raised:
        runs = self._run(self.task.strategy, 1, in_float64, **how)
        return runs if isinstance(runs, Raised) else runs[0]

    def _run(self, strategy: Callable[[], Any], ranks: int, in_float64: bool, **how: Any) -> list[Ran] | Raised:
        task = replace(self.task, strategy=strategy, devices=ranks, in_float64=in_float64, **how)
        self.pool.end_crowded_workers()
        try:
            processes = 1 if _is_in_one_process(strategy) else ranks
            found = self.pool.run(processes, run, self.make, task, timeout=self.timeout)
        except RankError as error:
            # An error of a rank's own, before the pool ended the others, says more than that they were ended.
            found = [each for _, (succeeded, each) in sorted(error.outcomes.items()) if succeeded]
            found.append(Raised(f"no end: {'; '.join(str(error).splitlines())}"))
        raised = [each for each in found if isinstance(each, Raised)]
        if not raised:
            return found
        self.pool.renew_world()
        return next((each for each in raised if not each.sentence.startswith("RankFailedError")), raised[0])


def _is_in_one_process(strategy: Callable[[], Any]) -> bool:
    """Return whether what a function makes has all devices in one process."""
    with suppress(ConfigurationError):  # the run says so
        return isinstance(strategy(), ParalDPStrategy)
    return False
