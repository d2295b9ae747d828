"""Run the reference and the strategies of a `check`, and find the first value in which they differ."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_paral.diagnostics.check_record import Item, Task
from lightning_paral.diagnostics.check_run import Fit, Raised, Ran, run
from lightning_paral.diagnostics.rank_pool import RankError, RankPool
from lightning_paral.errors import ReferenceFailedError

_KINDS = (
    "batch",
    "loss",
    "gradient norm",
    "learning rate",
    "parameter",
    "buffer",
    "optimizer state",
    "log",
    "validation",
    "epoch log",
    "evaluation",
)
"""The kinds of values in the order of a step, in which the first difference is looked for."""
_LOGGED = ("log", "validation", "epoch log", "evaluation")
_OF_EACH_RANK = ("loss", *_LOGGED)
"""Kinds whose values are means over the samples of a rank, unless ranks reduce them. Their mean is compared."""
_NOISE = 10.0
"""How many times as far from the reference as the run with reordered sums a run may be."""
_FLOORS = {"64-true": 1e-9, "32-true": 1e-5}
"""Precision -> the smallest relative difference that counts; 2e-2 if weights or activations have 16 bits."""
_ZERO = 1e-5
"""What is smaller than this part of the largest value of its kind may be zero but for rounding."""
_NO_MEAN = "a value that is no mean over samples, such as a count, or a mean over a rank's own tokens or boxes"
_UNEVEN = "a value is logged without sync_dist=True, while ranks may have different numbers of samples"
_NOT_SAVED = "a value that the module or a callback changes in training, and does not save"
_OF_FP32 = 1e-6
"""A relative difference in fp64 that code which computes in fp32 explains."""


class Made(NamedTuple):
    """What makes a strategy in a run."""

    make: Callable[[], Any]
    in_one_process: bool = False
    """Whether the strategy has all devices in one process."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value of a run that is not that of one process."""

    step: int
    """The optimizer step, from 1."""
    kind: str
    name: str
    off: float
    """The largest absolute difference; infinity if the value is missing or has another shape."""
    scale: float
    """The largest absolute value of the tensor."""
    ranks: str = ""
    """On which ranks, if not on all."""
    place: str = ""
    """After which hook, if hooks were watched."""

    def __str__(self) -> str:
        is_number = math.isfinite(self.off)
        off = f"differs by {self.off:.1e}" if is_number else "is missing, not finite, or has another shape"
        return " ".join(filter(None, (f"step {self.step}: {self.kind}", self.name, off, self.ranks, self.place)))


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """What came of one strategy."""

    strategy: str
    outcome: Literal["equal", "refused", "differs", "fails"]
    sentence: str = ""
    """Why it is refused, what differs, or the error."""
    precision: str = ""
    """The precision of the runs."""
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


class Reference:
    """What strategies are compared with: a run in one process, and how far rounding may lead from it.

    Args:
        record: the run.
        folder: where it has written its tensors.
    """

    def __init__(self, record: Ran, folder: Path) -> None:
        self.folder, self.precision = folder, record.precision
        # Within a batch, values are compared in the order of a step, whenever they were recorded.
        order = sorted(record.items, key=lambda item: (*item.key[:2], -1 if item.place else _KINDS.index(item.kind)))
        self.values = {item.key: item for item in order}
        self._scales: dict[Any, float] = {}
        """The largest value of each kind in each batch."""
        for item in order:
            if math.isfinite(item.value):
                self._scales[*item.key[:2], item.kind] = max(self._scale(item), abs(item.value))
        self._noise: dict[Any, float] = {}
        self.causes = record.causes
        self.vary: set[str] = set()
        """The names of logged values that the same code logs differently, such as times."""

    def learn_rounding(self, rounded: Ran) -> None:
        """Learn how far rounding may lead, from a run that differs by nothing but the order of its sums."""
        found, largest = {item.key: item for item in rounded.items}, dict[Any, float]()
        if any(_distance(found.get(key), item) for key, item in self.values.items() if item.kind == "batch"):
            return  # it had other data
        for key, item in self.values.items():
            name, off = (item.kind, item.name), _distance(found.get(key), item)
            largest[name] = self._noise[key] = max(largest.get(name, 0.0), off if math.isfinite(off) else 0.0)

    def learn_from_repetition(self, again: Ran) -> list[str]:
        """Learn which logged values vary, from the same run again; return sentences about what is not equal."""
        self.causes = list(dict.fromkeys([*self.causes, *again.causes]))
        unlike = list(self._differences([again]))
        self.vary = {each.name for each in unlike if each.kind in _LOGGED}
        told = []
        for each in [each for each in unlike if each.kind not in _LOGGED][:1]:
            what = "The data differ between two readings" if each.kind == "batch" else "The code is random"
            told.append(f"{what}: two runs in one process from the same seed are not equal. {each}.")
        if self.vary:
            names = ", ".join(sorted(self.vary))
            told.append(f"Not compared, because two runs in one process log different values: {names}.")
        return told

    def _scale(self, item: Item) -> float:
        return self._scales.get((*item.key[:2], item.kind), 0.0)

    def first_difference(self, runs: list[Ran]) -> Difference | None:
        """Return the first difference of the ranks from the reference that rounding does not explain."""
        first, in_hook = (next(self._differences(runs, in_hooks=each), None) for each in (False, True))
        if first is None or in_hook is None:
            return in_hook or first
        # The parameters after a step say less than what has led to them.
        is_earlier = first.kind in ("loss", "gradient norm", "learning rate") and first.step <= in_hook.step
        return first if is_earlier and in_hook.place.endswith("step") else in_hook

    def largest_difference(self, runs: list[Ran]) -> float:
        """Return the largest difference, relative to the largest value of its tensor, of what is not logged."""
        compared = ((item, off) for item, off, _ in self._compared(runs) if item.kind not in _LOGGED and off)
        return max((off / max(abs(item.value), _ZERO * self._scale(item)) for item, off in compared), default=0.0)

    def _differences(self, runs: list[Ran], in_hooks: bool = False) -> Iterator[Difference]:
        for item, off, ranks in self._compared(runs):
            if ranks is not None and bool(item.place) == in_hooks:
                what = {"step": item.step, "kind": item.kind, "name": item.name, "place": item.place}
                yield Difference(off=off, scale=abs(item.value), ranks=ranks, **what)  # type: ignore[arg-type]

    def _compared(self, runs: list[Ran]) -> Iterator[tuple[Item, float, str | None]]:
        """Yield each value of the reference, by how much it differs, and on which ranks by too much, if on any."""
        ranks = [{item.key: item for item in each.items} for each in runs]
        first = min((item.key[:2] for each in runs for item in each.items), default=(0, 0))
        # A run that resumes has a part of its first epoch only, and lacks what was logged before.
        at_once = {item.name for item in runs[0].items if item.kind == "log" and item.key[:2] == first}
        for key, item in self.values.items():
            is_missing = all(key not in each for each in ranks)
            may_lack = item.kind == "batch" or (first > (0, 0) and item.kind in ("validation", "epoch log"))
            varies = item.kind in _LOGGED and item.name in self.vary
            of_part = first > (0, 0) and item.kind == "log" and item.name not in at_once
            if item.key[:2] < first or varies or of_part or (is_missing and may_lack):
                continue
            offs = [_distance(each.get(key), item) for each in ranks]
            own = [each[key].value for each in ranks if key in each]
            if item.kind in _OF_EACH_RANK and own:  # a rank may log alone
                offs = [_distance(item._replace(value=sum(own) / len(own)), item)]
            floor = _FLOORS.get(self.precision, 2e-2)
            if item.kind in _LOGGED:
                floor = max(floor, _FLOORS["32-true"])  # metrics stay in fp32
            elif item.kind == "optimizer state":
                floor *= 10  # DeepSpeedCPUAdam rounds 1 - beta2 to fp32
            own_scale = abs(item.value) if math.isfinite(item.value) else 0.0
            of_kind = 0.0 if item.kind in _LOGGED else _ZERO * self._scale(item)
            allowed = max(_NOISE * self._noise.get(key, 0.0), floor * max(own_scale, of_kind))
            wrong = [str(rank) for rank, off in enumerate(offs) if not off <= allowed]
            where = f"on rank {', '.join(wrong)}" if len(wrong) < len(offs) else ""
            yield item, max(offs), where if wrong else None

    def unreduced(self, runs: list[Ran]) -> set[str]:
        """Return the names of values that ranks log without reducing them."""
        ranks = [{item.key: item for item in each.items if item.kind in _LOGGED} for each in runs]
        names = {key[-1] for key in ranks[0] if len({each[key].value for each in ranks if key in each}) > 1}
        return names - self.vary


def _distance(found: Item | None, expected: Item) -> float:
    if found is None:
        return float("inf")
    if found.off is not None:
        return found.off
    if found.value == expected.value or (math.isnan(found.value) and math.isnan(expected.value)):
        return 0.0
    off = abs(found.value - expected.value)
    return float("inf") if math.isnan(off) else off


class Checks:
    """The runs of a `check`, each compared with those in one process, which are made when they are first needed.

    Args:
        make: returns what to train.
        task: what all runs have in common.
        pool: the ranks.
        timeout: seconds after which a run counts as hanging.
        progress: is called with what runs next.
        precisions: whether to train in fp64, in the order of the attempts; `False` is the precision of the project.
    """

    def __init__(
        self,
        make: Callable[[], Fit],
        task: Task,
        pool: RankPool,
        timeout: float = 300.0,
        progress: Callable[[str], object] = str,
        precisions: tuple[bool, ...] = (True, False),
    ) -> None:
        self._precisions = precisions
        self._make, self._task, self._pool, self._timeout, self._progress = make, task, pool, timeout, progress
        self._references: dict[bool, Reference | Raised] = {}
        self._notes: list[str] = []
        self._unreduced: set[str] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the runs up to now have shown of the project itself."""
        names = ", ".join(sorted(self._unreduced))
        told = [f"Logged without sync_dist=True, so that loggers show the value of rank 0: {names}."] if names else []
        return *self._notes, *told

    def row(self, label: str, made: Made, ranks: int, saves: bool = True) -> CheckRow:
        """Train under a strategy, and save half way if `saves`.

        Raises:
            ReferenceFailedError: the run in one process fails.
        """
        row: CheckRow | None = None
        for in_float64 in self._precisions:
            reference = self._reference(in_float64)
            if isinstance(reference, Raised):
                continue
            self._progress(f"{label} on {ranks} ranks")
            path = self._task.folder / f"{label}.ckpt" if saves else None
            runs = self._run(made, ranks, reference.folder, in_float64, save_to=path)
            row = self._judged(label, reference, runs)
            is_of_fp32 = in_float64 and row.outcome == "differs" and row.largest < _OF_FP32
            if row.outcome != "refused" and not is_of_fp32:  # in fp64, it may be refused for the precision
                return row
        if row is None:
            raise ReferenceFailedError(f"The run in one process, with strategy='auto', failed: {reference}")
        return row

    def resumed(self, row: CheckRow, loader: str, made: Made, ranks: int) -> CheckRow:
        """Resume from the checkpoint of an equal row under another strategy; return the row with what came of it."""
        in_float64 = row.precision == "64-true"
        reference = self._references[in_float64]
        assert isinstance(reference, Reference)
        self._progress(f"{row.strategy}, resumed under {loader}")
        path = self._task.folder / f"{row.strategy}.ckpt"
        runs = self._run(made, ranks, reference.folder, in_float64, resume_from=path)
        if not isinstance(runs, Raised) and min((item.key[:2] for item in runs[0].items), default=(0, 0)) == (0, 0):
            runs = Raised("no resume", "it trained from the beginning", False, "")
        found = self._judged(row.strategy, reference, runs)
        how = f"resumed under {loader} on {ranks} rank{'s' if ranks > 1 else ''}"
        if found.outcome == "equal":
            return replace(row, largest=max(row.largest, found.largest), resumed=how)
        causes = (*found.causes, _NOT_SAVED) if found.outcome == "differs" else ()
        return replace(found, sentence=f"equal until {how}: {found.sentence}", causes=causes)

    def _judged(self, label: str, reference: Reference, runs: list[Ran] | Raised) -> CheckRow:
        row = CheckRow(strategy=label, outcome="equal", precision=reference.precision)
        if isinstance(runs, Raised):
            outcome: Literal["refused", "fails"] = "refused" if runs.is_ours else "fails"
            return replace(row, outcome=outcome, sentence=str(runs))
        self._unreduced |= reference.unreduced(runs)
        first = reference.first_difference(runs)
        if first is None:
            return replace(row, largest=reference.largest_difference(runs))
        causes = dict.fromkeys([*reference.causes, *(cause for each in runs for cause in each.causes)])
        if first.kind in _LOGGED and first.name in reference.unreduced(runs):
            causes = dict.fromkeys([_UNEVEN])
        elif not causes and first.kind in _OF_EACH_RANK:
            causes = dict.fromkeys([_NO_MEAN])
        relative = min(first.off / (first.scale or 1.0), sys.float_info.max)  # JSON has no infinity
        return replace(row, outcome="differs", sentence=str(first), largest=relative, causes=tuple(causes))

    def _reference(self, in_float64: bool) -> Reference | Raised:
        if in_float64 not in self._references:
            self._progress("one process")
            self._references[in_float64] = self._made_reference(in_float64)
        return self._references[in_float64]

    def _made_reference(self, in_float64: bool) -> Reference | Raised:
        folder = self._task.folder / ("float64" if in_float64 else "given")
        folder.mkdir()
        record = self._run_alone(folder, in_float64, is_reference=True)
        if isinstance(record, Raised):
            return record
        if not record.num_steps:
            return Raised("no step", "no optimizer step was taken", False, "")
        if record.num_steps < self._task.steps and not self._notes:
            self._notes.append(f"One process ended after {record.num_steps} of {self._task.steps} optimizer steps.")
        made = Reference(record, folder)
        first = next((each for each in self._references.values() if isinstance(each, Reference)), None)
        if first is None:
            again = self._run_alone(folder, in_float64)
            self._notes += [] if isinstance(again, Raised) else made.learn_from_repetition(again)
        else:
            made.vary, made.causes = first.vary, first.causes
        if not in_float64:
            rounded = self._run_alone(folder, in_float64, reorders_sums=True)
            if isinstance(rounded, Ran):
                made.learn_rounding(rounded)
        return made

    def _run_alone(self, folder: Path, in_float64: bool, **how: Any) -> Ran | Raised:
        runs = self._run(Made(self._task.strategy), 1, folder, in_float64, **how)
        return runs if isinstance(runs, Raised) else runs[0]

    def _run(self, made: Made, ranks: int, folder: Path, in_float64: bool, **how: Any) -> list[Ran] | Raised:
        task = replace(self._task, strategy=made.make, devices=ranks, in_float64=in_float64, reference=folder, **how)
        for path in folder.glob("raised-*.json"):
            path.unlink()
        self._pool.end_crowded_workers()
        try:
            found = self._pool.run(1 if made.in_one_process else ranks, run, self._make, task, timeout=self._timeout)
        except RankError as error:
            # An error of a rank's own, before the pool ended it, says more than that it was ended.
            found = [Raised(*json.loads(path.read_text())) for path in sorted(folder.glob("raised-*.json"))]
            found = [each for each in found if each.kind != "RankFailedError"] or [
                Raised("no end", "; ".join(str(error).splitlines()), False, "")
            ]
        raised = [each for each in found if isinstance(each, Raised)]
        if not raised:
            return found
        self._pool.renew_world()
        return next((each for each in raised if each.kind != "RankFailedError"), raised[0])
