"""Resume from the newest checkpoint in a folder that is complete and undamaged."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_paral.checkpoint.load import Candidate, find_candidates, verify_records
from lightning_paral.checkpoint.storage import is_remote, without_scheme
from lightning_paral.compat.lightning.loops import choose_checkpoint
from lightning_paral.distributed.exchange import RankGroup, all_ranks, explain
from lightning_paral.errors import CheckpointError, ConfigurationError


class AutoResume(Callback):
    """Resumes a fit from the newest checkpoint in a folder; without one, the fit starts from the beginning.

    `Trainer(callbacks=[AutoResume("checkpoints"), ModelCheckpoint("checkpoints", ...)])` makes the same command start a
    run and continue it: after a crash, under `torchrun --max-restarts`, after preemption, on more or fewer ranks.

    All ranks load the same checkpoint. It is verified while it is loaded: each rank verifies a part of the files, and
    nothing is restored before all ranks have succeeded. If a checkpoint is damaged, a warning names what is damaged,
    and the next older one is loaded. `ModelCheckpoint(save_top_k=2, monitor="step", mode="max")` keeps two.

    An explicit `trainer.fit(ckpt_path=...)` has priority, and a Trainer that has already trained continues from its own
    state.

    Args:
        dirpath: the folder of the checkpoints, as in `ModelCheckpoint`. Not a URL.

    Raises:
        ConfigurationError: `dirpath` is a URL.
    """

    def __init__(self, dirpath: str | Path) -> None:
        if is_remote(dirpath):
            raise ConfigurationError(
                f"AutoResume({str(dirpath)!r}) searches folders, not URLs. Save to a folder that all nodes share, or "
                "choose the checkpoint yourself and pass it as trainer.fit(ckpt_path=...)."
            )
        self.dirpath = str(dirpath)
        self._undo: Callable[[], None] | None = None

    @property
    def _folder(self) -> Path:
        return Path(os.path.expanduser(without_scheme(self.dirpath)))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare to resume, and warn if no callback saves to the folder."""
        if stage != "fit" or trainer.global_step > 0 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folders = [getattr(each, "dirpath", None) for each in vars(trainer)["callbacks"] if each is not self]
        if os.path.realpath(self._folder) not in [os.path.realpath(each) for each in folders if each]:
            rank_zero_warn(
                f"AutoResume({self.dirpath!r}) resumes from {self._folder}, but no callback saves checkpoints there. "
                f"Add ModelCheckpoint({self.dirpath!r}, every_n_train_steps=...) to the callbacks of the Trainer."
            )
        self._undo = choose_checkpoint(trainer, lambda load: self._resume(trainer, load))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End what `setup` began."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End what `setup` began, because `teardown` is not called after an exception."""
        self._end()

    def _end(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _resume(self, trainer: Trainer, load: Callable[[str], None]) -> None:
        """Load the newest checkpoint that can be loaded. *Collective* over all ranks.

        Raises:
            CheckpointError: there are checkpoints, but none can be loaded. Starting from the beginning would waste the
                work in them.
        """
        ranks = all_ranks()
        candidates = ranks.run_on_rank_0(f"Searching {self._folder}", lambda: find_candidates(self._folder))
        faults = [f"{each.path}: {each.fault}" for each in candidates if each.fault]
        for candidate in (each for each in candidates if not each.fault):
            fault = next(filter(None, ranks.gather(_try(load, candidate, ranks))), "")
            if not fault:
                if faults:
                    rank_zero_warn("\n".join(["AutoResume:", *faults, f"resuming from {candidate.path} instead."]))
                rank_zero_info(f"AutoResume: {_describe(candidate, trainer)}")
                return
            faults.append(f"{candidate.path}: {fault}")
        if faults:
            raise CheckpointError(
                f"AutoResume({self.dirpath!r}): none of the checkpoints in the folder can be loaded. "
                + "\n".join(faults)
                + "\nTo start from the beginning, move them to another folder."
            )
        rank_zero_info(f"AutoResume: there is no checkpoint in {self._folder}, so the run starts from the beginning.")


def _try(load: Callable[[str], None], candidate: Candidate, ranks: RankGroup) -> str:
    """Verify and load a checkpoint; return what is damaged, or an empty string. *Collective*.

    Other errors are raised: if the disk cannot be read or the module does not fit, an older checkpoint does not help.
    """
    try:
        if candidate.world_size is None:
            verify_records(candidate.path, ranks)  # `load` verifies checkpoints of this package
        load(candidate.path)
    except (CheckpointError, FileNotFoundError) as error:
        return explain(error)
    return ""


def _describe(candidate: Candidate, trainer: Trainer) -> str:
    """Return the message about a checkpoint from which a run resumes."""
    saved_at = time.ctime(candidate.saved_at)
    parts = [f"resuming from {candidate.path}: step {candidate.global_step}, saved {saved_at}."]
    if candidate.world_size not in (None, trainer.world_size):
        split: Any = getattr(getattr(trainer.strategy, "sampling", None), "split", "global")
        parts.append(
            f"The number of ranks has changed from {candidate.world_size} to {trainer.world_size}"
            + ("." if split == "global" else f", and with split={split!r} so does the order of samples; see 'global'.")
        )
    return " ".join(parts)
