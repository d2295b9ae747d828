"""After an exception, find out which ranks can still save a checkpoint, and let callbacks save it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_paral.distributed.exchange import RankGroup, all_ranks, name_ranks
from lightning_paral.distributed.failures.failure_watch import FailureWatch
from lightning_paral.distributed.failures.reachable import ReachableRanks, wait_for_ranks
from lightning_paral.distributed.failures.survivors import wait_for_savers
from lightning_paral.distributed.launching.rank_main import tell_whether_saving
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.strategies.step_boundary import StepBoundary


class AfterFailure(StepBoundary):
    """Mixin, placed before the Lightning base: the ranks that live and are at the same step save together."""

    _run: str = ""
    """The name of the run, equal on all ranks; empty between runs."""
    _reached: ReachableRanks | None = None
    timeout: timedelta
    """How long ranks wait for each other when they join, and in every collective."""
    _failures: FailureWatch | None = None
    """During a run with several ranks, what ends this rank after another one has failed."""

    @property
    def _is_failing(self) -> bool:
        """Whether an exception ended the run, and the teardown is not finished."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and bool(self._run) and trainer.state.status == TrainerStatus.INTERRUPTED

    def _reachable_ranks(self) -> ReachableRanks:
        """Return which ranks can be reached: all of them, unless an exception ended the run.

        The first call after an exception is *collective*.
        """
        if not self._is_failing or not dist.is_initialized():
            return ReachableRanks(all_reachable=True)
        if self._reached is None:
            self._reached = wait_for_ranks(
                self._run, self._step_position(), self.dims.shards, self.timeout, dead=self._dead_ranks
            )
        return self._reached

    def _dead_ranks(self) -> set[int]:
        return set() if self._failures is None else self._failures.dead_ranks()

    def _ranks(self) -> RankGroup:
        """Return the ranks that save together."""
        reached = self._reachable_ranks()
        if reached.savers is None or len(reached.savers.ranks) == self.world_size:
            return all_ranks(reached.group)
        members = reached.savers.ranks
        return RankGroup(members.index(self.global_rank), len(members), reached.savers_group, members)

    @property
    def _may_save(self) -> bool:
        """Whether this rank is one of those that save. The first call after an exception is *collective*."""
        savers = self._reachable_ranks().savers
        return savers is None or self.global_rank in savers.ranks

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, or the first of the ranks that save after rank 0 has died."""
        savers = None if self._reached is None else self._reached.savers
        if savers is not None and savers.ranks and 0 not in savers.ranks:
            return self.global_rank == savers.ranks[0]
        return bool(super().is_global_zero)

    @contextmanager
    def _saving_after_failure(self) -> Iterator[None]:
        """Give a save the time that it takes, before the watcher ends a process that does not finish its teardown."""
        if self._failures is None or self._failures.is_saving:
            yield
            return
        self._failures.is_saving = True
        tell_whether_saving(True)
        try:
            yield
        finally:
            self._failures.leave()
            self._failures.is_saving = False
            tell_whether_saving(False)

    def _wait_for_savers(self) -> None:
        """Let this rank wait for those that save if it does not save itself."""
        savers = None if self._reached is None else self._reached.savers
        if savers is not None and 0 < len(savers.ranks) < self.world_size and dist.is_initialized():
            with self._saving_after_failure():
                wait_for_savers(self._run, self.global_rank, savers.ranks, self.timeout, self._dead_ranks)

    def _save_on_exception(
        self, callback: Callback, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        """Let `callback` save on the ranks that can. If saving fails, warn, so that the error of the run is raised."""
        name = type(callback).__name__
        try:
            with self._saving_after_failure():  # also while it finds out which ranks live
                if self._may_save:
                    type(callback).on_exception(callback, trainer, module, exception)
                else:
                    self._warn_not_saved(f"{name} saved no checkpoint")
        except Exception as error:
            if self.is_global_zero:
                reason = self._why_incomplete()
                warnings.warn(
                    f"{name} could not save after {type(exception).__name__}: {error}{reason and ' ' + reason}",
                    stacklevel=2,
                )

    def _why_incomplete(self) -> str:
        """Return a sentence about the ranks that do not save, and those whose shards are missing; empty if none."""
        savers = self._reachable_ranks().savers
        if savers is None or not savers.reason:
            return ""
        missing = f", and no rank that could save has the shards of {name_ranks(savers.missing)}"
        return f"The reason: {savers.reason}{missing if savers.missing and savers.ranks else ''}."

    def _warn_not_saved(self, what: str) -> None:
        savers = self._reachable_ranks().savers
        if savers is None or not savers.ranks:  # otherwise the ranks that save report
            # On every rank, because rank 0 may not be among those that failed.
            warnings.warn(f"{what} on rank {self.global_rank}. {self._why_incomplete()}", stacklevel=2)

    def _warn_saved_by_some(self, filepath: Any) -> None:
        """Say that a checkpoint was saved without some ranks, and which of its values are not theirs."""
        savers = self._reachable_ranks().savers
        if savers is not None and savers.reason and self.is_global_zero:
            others = [rank for rank in range(self.world_size) if rank not in savers.ranks]
            warnings.warn(
                f"{filepath} was saved {self._step_position()} by {name_ranks(savers.ranks)} alone: "
                f"{savers.reason}. It is complete. The random states of {name_ranks(others)} are unknown; it has those "
                f"of rank {savers.ranks[0]} in their place.",
                stacklevel=2,
            )
