"""`check`: prove on a user's own module and data that training under a strategy equals training in one process."""

import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from lightning_paral.diagnostics.check_compare import CheckRow, Checks
from lightning_paral.diagnostics.check_run import Fit, Task
from lightning_paral.diagnostics.rank_pool import RankPool
from lightning_paral.errors import ConfigurationError, DifferenceError
from lightning_paral.registry import STRATEGIES, explain_unknown_name
from lightning_paral.text import make_table

DEFAULT = ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")
Make = Callable[[], Any]
Strategies = Literal["all"] | Sequence[str] | Mapping[str, Make]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check` has found."""

    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...] = ()
    """What is said first: that the reference differs from itself."""

    def raise_if_different(self) -> None:
        """Raise a `DifferenceError` unless every strategy is equal or refused."""
        wrong = [f"{row.strategy} {row.outcome}: {row.sentence}" for row in self.rows if not row.is_allowed]
        if wrong:
            raise DifferenceError("\n".join([*wrong, *self.notes]))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return asdict(self)

    def __rich__(self) -> Group:
        rows = [
            (
                *(row.strategy, row.outcome, f"{row.largest:.0e}" if row.precision else "", row.precision),
                escape(row.sentence or row.resumed),
            )
            for row in self.rows
        ]
        table = make_table(("strategy", "outcome", "largest", "precision", ""), rows, left=(0, 1, 3, 4))
        causes = dict.fromkeys(cause for row in self.rows for cause in row.causes)
        return Group(*map(Text, self.notes), table, *(Text(f"Possible cause: {cause}.") for cause in causes))


def check(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Any] | None = None,
    *,
    strategies: Strategies = DEFAULT,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> CheckReport:
    """Train a few steps in one process and under strategies, and compare every value that a step leaves behind.

    The reference trains `steps` optimizer steps in one process with `strategy="auto"`, and validates. Each strategy
    does the same on `ranks` ranks that divide the same batches. Half way it saves, and another strategy resumes from
    this checkpoint on another number of ranks.

    Ranks are processes of their own, which import the functions: define them at the top level of a module.

    Args:
        make_module: returns the module. It is called in every run, after the generators have the same seed.
        make_data: returns what `Trainer.fit` takes: a LightningDataModule, a loader of training data, or a tuple of
            training and validation data. `None` if the module has loaders.
        strategies: names, `"all"`, or a mapping from labels to functions that return a strategy.
        trainer: options of the Trainer that change numbers, such as `precision`, `accumulate_grad_batches`,
            `gradient_clip_val` or `callbacks`.
        **options: `ranks=2`, the number of ranks; `steps=8`, that of optimizer steps; `seed=1`; `accelerator="cpu"`, of
            which `"cuda"` needs a device for each rank; `timeout=300.0`, the seconds after which a run hangs;
            `keep_dropout=False`, whether to leave dropout on.

    Raises:
        ReferenceFailedError: the run in one process fails.
        ConfigurationError: a strategy is unknown, or the functions cannot be pickled.
    """
    make = partial(_make, make_module, make_data, dict(trainer or {}))
    return check_project(make, strategies, **options)


def _make(module: Callable[[], Any], data: Callable[[], Any] | None, trainer: Mapping[str, Any]) -> Fit:
    return Fit(module=module(), data=None if data is None else data(), trainer=trainer)


def check_project(
    make: Callable[[], Fit],
    strategies: Strategies = DEFAULT,
    *,
    ranks: int = 2,
    steps: int = 8,
    accelerator: str = "cpu",
    timeout: float = 300.0,
    progress: Callable[[str], object] = str,
    pool: RankPool | None = None,
    **task: Any,
) -> CheckReport:
    """Check what `make` returns, as `check` does.

    Args:
        make: returns what to train; it is pickled.
        strategies: names, `"all"`, or a mapping from labels to functions that return a strategy.
        ranks: the number of ranks, or of devices of `paral_dp`.
        steps: the number of optimizer steps.
        accelerator: that of the Trainer.
        timeout: seconds after which a run counts as hanging.
        progress: is called with what runs next.
        pool: ranks that run already; `None` starts and ends them.
        **task: `seed` and `keep_dropout`, as in `check`.
    """
    if ranks < 1 or steps < 2:
        raise ConfigurationError(f"ranks={ranks} and steps={steps} were given. Give at least 1 rank and 2 steps.")
    available = torch.cuda.device_count() if accelerator == "cuda" else max(ranks, 2)
    if ranks > available:
        raise ConfigurationError(f"ranks={ranks} was given, and this machine has {available} CUDA devices. Give fewer.")
    if not isinstance(strategies, Mapping):
        strategies = by_name([entry.name for entry in STRATEGIES] if strategies == "all" else strategies)
    chosen = dict(strategies)
    try:
        pickle.dumps((make, chosen))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"check starts processes, which import the functions. Define them at the top level of a module: {error}."
        ) from None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        if pool is None:
            pool = RankPool("gloo" if accelerator == "cpu" else "cuda:nccl,cpu:gloo", timeout + 60)
            stack.callback(pool.close)
        checks = Checks(
            make, Task(steps=steps, folder=folder, accelerator=accelerator, **task), pool, timeout, progress
        )
        fewer = min(ranks // 2 or 2, available)
        rows = tuple(_checked(checks, label, strategy, ranks, fewer) for label, strategy in chosen.items())
        return CheckReport(rows=rows, notes=tuple(checks.notes))


def _checked(checks: Checks, label: str, strategy: Make, ranks: int, fewer: int) -> CheckRow:
    """Train under a strategy; if it equals one process, resume from its checkpoint under another one."""
    row = checks.row(label, strategy, ranks)
    if row.outcome != "equal":
        return row
    loader = "paral_fsdp" if label == "paral_ddp" else "paral_ddp"
    found = checks.resumed(row, loader, by_name([loader])[loader], fewer)
    return replace(row, resumed=f"not resumed: {found.sentence}") if found.outcome == "refused" else found


def by_name(names: Iterable[str]) -> dict[str, Make]:
    """Return functions that make the strategies with the given names.

    Raises:
        ConfigurationError: a name is unknown.
    """
    known = {entry.name: partial(entry.strategy, **entry.arguments) for entry in STRATEGIES}
    for name in names:
        if name not in known:
            raise ConfigurationError(explain_unknown_name(name))
    return {name: known[name] for name in names}
