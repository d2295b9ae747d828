"""`paral bench checkpoint`: time saving, the stall of an asynchronous save, loading and consolidating."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_paral.checkpoint.consolidate import select, write_file
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.resolve import read_current
from lightning_paral.diagnostics.bench.devices import device_and_backend
from lightning_paral.diagnostics.bench.plain_files import drop_from_cache, read_plain, size_of, write_plain
from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.diagnostics.bench.ranks import OnProgress, run_on_ranks
from lightning_paral.diagnostics.bench.raw_loop import RAW
from lightning_paral.diagnostics.bench.step import check_strategies
from lightning_paral.diagnostics.bench.task import count_params, make_task
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import CheckpointOptions
from lightning_paral.registry import STRATEGIES

DEFAULT_STRATEGIES = ("paral_ddp", "ddp", "paral_fsdp")
SAVE, STALL, FULL, LOAD, WRITE, READ = "save", "stall", "full", "load", "write", "read"
_OPTIONS = {STALL: CheckpointOptions(async_save=True), FULL: CheckpointOptions("full")}
"""How checkpoints are written, by what is measured."""
_DEFAULT_SIZES = ("--model.width=512", "--model.num_layers=8")
"""Of the small Transformer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """The checkpoints of one strategy. Seconds are medians over rounds, each until all ranks have finished."""

    strategy: str
    size_bytes: int
    """The size of the checkpoint on the disk."""
    save: float
    """Seconds of `Trainer.save_checkpoint`."""
    stall: float | None
    """Seconds until it returns with `async_save`; `None` for strategies without."""
    full: float | None
    """Seconds of `Trainer.save_checkpoint` with `form="full"`, which gathers the state on rank 0; `None` for all but
    the sharding strategies of this package."""
    load: float
    """Seconds to load weights and optimizer states."""
    consolidate: float | None
    """Seconds to convert a folder to one file; `None` if the checkpoint is a file."""
    write: float
    """Seconds to write a plain file of the same size from one process, and to flush it to the disk."""
    read: float
    """Seconds to read that file through a small buffer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointResults:
    """The result of `paral bench checkpoint`."""

    num_ranks: int
    module: str
    num_params: int
    is_cold: bool
    """Whether files were read from the disk; from the page cache otherwise."""
    rows: tuple[CheckpointRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def check_checkpoint_strategies(names: Sequence[str]) -> None:
    """Check the names of strategies.

    Raises:
        ConfigurationError: one is unknown, occurs twice, or has no checkpoints.
    """
    check_strategies(names)
    for name in names:
        if name in RAW:
            raise ConfigurationError(
                f"--strategies: {name!r} is a hand-written loop, which has no checkpoints. Name strategies of this "
                "package or of Lightning."
            )


def measure_checkpoints(
    strategies: Sequence[str],
    *,
    config: str | None,
    num_ranks: int,
    rounds: int,
    folder: Path,
    timeout: timedelta,
    cold: bool = False,
    on_progress: OnProgress | None = None,
) -> CheckpointResults:
    """Measure checkpoints, one strategy after the other.

    Args:
        strategies: names of registered strategies.
        config: the path of a LightningCLI configuration; `None` for a small Transformer.
        num_ranks: the number of ranks of each strategy.
        rounds: how many times each is measured.
        folder: an empty folder, to which checkpoints are written.
        timeout: how long to wait for a strategy.
        cold: whether to remove files from the page cache before they are read.
        on_progress: called with what is being measured.

    Raises:
        ConfigurationError: a strategy cannot train the module.
        RankFailedError: a rank failed.
    """
    rows = []
    about: dict[str, Any] = {}
    for name in strategies:

        def run(function: str, num: int, kind: str = SAVE, name: str = name) -> Any:
            if on_progress is not None:
                on_progress(f"{name}: {'consolidate' if function == run_consolidate.__name__ else kind}")
            arguments = {"strategy": name, "config": config, "folder": str(folder), "rounds": rounds, "cold": cold}
            arguments |= {} if function == run_consolidate.__name__ else {"kind": kind}
            return run_on_ranks(f"{__name__}:{function}", arguments, num_ranks=num, timeout=timeout, name=name)[0]

        found = run(run_saves.__name__, num_ranks)
        consolidated = run(run_consolidate.__name__, 1) if found["is_folder"] else None
        kinds = ([STALL] if _is_ours(name) else []) + ([FULL] if _is_ours(name) and found["is_folder"] else [])
        others = {kind: median(run(run_saves.__name__, num_ranks, kind)["seconds"][kind]) for kind in kinds}
        about = about or found
        seconds = {what: median(times) for what, times in found["seconds"].items()}
        rows.append(
            CheckpointRow(
                strategy=name,
                size_bytes=found["size_bytes"],
                stall=others.get(STALL),
                full=others.get(FULL),
                consolidate=None if consolidated is None else median(consolidated),
                **seconds,
            )
        )
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return CheckpointResults(
        num_ranks=num_ranks,
        module=about["module"],
        num_params=about["num_params"],
        is_cold=cold,
        rows=tuple(rows),
    )


def _is_ours(name: str) -> bool:
    return any(entry.name == name for entry in STRATEGIES)


def run_saves(
    rank: Rank, *, strategy: str, config: str | None, folder: str, rounds: int, cold: bool, kind: str
) -> dict[str, Any]:
    """Train one step under a strategy, then save, and load if `kind` is `SAVE`. *Collective* over all ranks."""
    device, _ = device_and_backend()
    task = make_task(config, _DEFAULT_SIZES if config is None else ())
    saves = _Saves(Path(folder), rounds, kind, cold)
    configured = _with_options(strategy, _OPTIONS[kind]) if kind in _OPTIONS else strategy
    trainer = task.make_trainer(configured, device, rank.world_size, saves, max_steps=1)
    trainer.fit(task.module, datamodule=task.data)
    return {
        "module": type(task.module).__name__,
        "num_params": saves.num_params,
        "size_bytes": saves.size_bytes,
        "is_folder": saves.path.is_dir(),
        "seconds": saves.seconds,
    }


def run_consolidate(
    rank: Rank, *, strategy: str, config: str | None, folder: str, rounds: int, cold: bool
) -> list[float]:
    """Convert the checkpoint that `run_saves` has left to one file, and return the seconds of each round."""
    del rank, strategy, config
    source, out = Path(folder, SAVE), Path(folder, "consolidated.ckpt")
    seconds = []
    about = {"form": "full", "strategy": "", "world_size": 0, "epoch": 0, "global_step": 0}
    for _ in range(rounds):
        out.unlink(missing_ok=True)
        if cold:
            drop_from_cache(source)
        began = time.perf_counter()
        found = read_current(source, RankGroup(), lambda path: load(path, RankGroup(), weights_only=True))
        write_file(select(found, weights_only=False, dtype=None), out, about, lambda _: None)
        seconds.append(time.perf_counter() - began)
    return seconds


def _with_options(name: str, options: CheckpointOptions) -> Strategy:
    (entry,) = (entry for entry in STRATEGIES if entry.name == name)
    made: Callable[..., Strategy] = entry.strategy
    return made(**entry.arguments, checkpoint=options)


class _Saves(Callback):
    """Saves and loads after the first step."""

    def __init__(self, folder: Path, rounds: int, kind: str, cold: bool) -> None:
        self.path = folder / (FULL if kind == FULL else SAVE)
        self.seconds: dict[str, list[float]] = {}
        self.size_bytes = 0
        self.num_params = 0
        self._plain = folder / "plain"
        self._rounds = rounds
        self._kind = kind
        self._cold = cold

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        self.num_params = count_params(pl_module)
        for _ in range(self._rounds):
            self._note(self._kind, lambda: trainer.save_checkpoint(self.path))
            if self._kind != SAVE:
                strategy.finish_saving()
                continue
            self.size_bytes = size_of(self.path)
            self._prepare_to_read(self.path)
            self._note(LOAD, lambda: _load(strategy, self.path))
            self._note(WRITE, lambda: write_plain(self._plain, self.size_bytes) if trainer.is_global_zero else None)
            self._prepare_to_read(self._plain)
            self._note(READ, lambda: read_plain(self._plain) if trainer.is_global_zero else None)

    def _prepare_to_read(self, path: Path) -> None:
        if self._cold:
            dist.barrier()
            drop_from_cache(path)

    def _note(self, name: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        began = time.perf_counter()
        action()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)


def _load(strategy: Any, path: Path) -> None:
    checkpoint = strategy.load_checkpoint(path)
    strategy.load_model_state_dict(checkpoint)
    strategy.load_optimizer_state_dict(checkpoint)


def check_folder(folder: str | None) -> None:
    """Check the option `--folder`.

    Raises:
        ConfigurationError: it is not a folder in which files can be created.
    """
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ConfigurationError(
            f"--folder {folder} is not a folder in which files can be created. Name one on the disk to be measured."
        )
