"""Watch a run: begin and end its watcher, report what ends it early, and let callbacks save after it if possible."""

import faulthandler
import os
import sys
import traceback
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.process_groups import new_named_group, use_default_timeout
from lightning_paral.distributed.exchange import RankGroup, all_ranks, explain
from lightning_paral.distributed.failure import FailureWatch, as_consequence, describe_exit, remember_first
from lightning_paral.distributed.hangs import Hangs
from lightning_paral.distributed.launcher import agreed_status
from lightning_paral.distributed.process_group import explain_timeout, release_process_group
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import CheckpointError
from lightning_paral.model.user_hooks import trainer_of
from lightning_paral.options import Form


@dataclass(frozen=True, kw_only=True)
class Watching:
    """What watches a run with several ranks."""

    watcher: RankWatcher
    """The thread that exchanges messages with the other ranks."""
    failures: FailureWatch
    """Ends this rank after another one has failed."""
    hangs: Hangs
    """Asks all ranks where they are."""


class RunWatch:
    """The part of a strategy that knows whether its run lives. All ranks learn of an error, and then wait for no other.

    Between `begin` and `end` there is a run.

    If every rank holds all values, rank 0 saves alone. If ranks hold shards, they save if each has raised an error of
    its own after the same optimizer step.

    Args:
        strategy: the strategy, for all of its runs.
        timeout: how long ranks wait for each other when they join, and in every collective.
        form: the form of checkpoints if the user does not choose one; `"sharded"` if ranks may hold shards.
    """

    name: str = ""
    """The name of the run, equal on all ranks; empty between runs."""
    watching: Watching | None = None
    """During a run with several ranks."""
    why_interrupted: str = ""
    """From the teardown until the next run, names the failure of another rank that ended the run; empty if none did."""
    _guards_hooks: bool = False
    """After a failure, whether the hooks are guarded that are called then."""
    _step: str = ""
    """After an error of this rank's own, the number of optimizer steps; otherwise empty."""
    _reached: tuple[RankGroup | None] | None = None
    """After a failure, the ranks that raised together, or `None`, once they are known."""

    def __init__(self, strategy: ParallelStrategy, timeout: timedelta, form: Form) -> None:
        self._strategy, self.timeout, self._default_form = strategy, timeout, form
        self._undo = ExitStack()
        """Undoes what holds for the duration of a run only."""

    @property
    def _trainer(self) -> Trainer | None:
        return trainer_of(self._strategy.lightning_module)

    @property
    def is_in_run(self) -> bool:
        """Whether the ranks have joined, and the run has not ended."""
        return bool(self.name)

    @property
    def is_failing(self) -> bool:
        """Whether an exception ended the run, and the teardown is not finished."""
        trainer = self._trainer
        return trainer is not None and self.is_in_run and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _timeout_option(self) -> str:
        return f"{type(self._strategy).__name__}(timeout=...)"

    def begin(self) -> None:
        """Agree on a name for the run, by which ranks find each other after an exception. *Collective*."""
        self._reached, self._step = None, ""
        self._end_watching()
        self._undo.close()
        self._guards_hooks = False
        self._undo.callback(use_default_timeout(self.timeout))
        self.name = uuid.uuid4().hex
        if self._strategy.world_size == 1:
            return
        self.name = self._strategy.broadcast(self.name)
        watcher = RankWatcher(self.name, self.timeout.total_seconds() + 5.0)
        requeue = getattr(self._strategy.cluster_environment, "requeue_signal", None)  # of SLURM
        takes_signal = getattr(requeue, "name", "") != "SIGUSR2"
        hangs = Hangs(watcher, self.timeout, self._timeout_option, takes_signal=takes_signal)
        self.watching = Watching(watcher=watcher, failures=FailureWatch(watcher), hangs=hangs)
        # Not before `end` can end them: from now on, the failure of another rank may interrupt this.
        watcher.add(self.watching.failures)
        watcher.add(hangs)
        if not faulthandler.is_enabled():
            # If a rank sends more than a collective takes, gloo ends the process in C++: say in which line it waits.
            faulthandler.enable(2)  # not `sys.stderr`, which may have no file
            self._undo.callback(faulthandler.disable)

    def end(self) -> None:
        """End the run; after a failure with several ranks, release the process group, in which ranks may still wait."""
        try:
            self._end_watching()
        finally:
            self._undo.close()
            self._guards_hooks = False
            trainer, num_ranks = self._trainer, self._strategy.world_size
            if trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED and num_ranks > 1:
                release_process_group(after_failure=True)
            self.name, self._reached = "", None

    def _end_watching(self) -> None:
        watching = self.watching
        try:
            if watching is not None:
                watching.failures.leave()  # first: the failure of another rank must not interrupt what follows
        finally:
            if watching is not None:
                watching.watcher.end()
                watching.hangs.end()
                watching.failures.end()
                self.why_interrupted = watching.failures.first.why_interrupted()
            self.watching = None

    # Called before Lightning's hooks for exceptions

    def report_failure(self, error: BaseException) -> BaseException:
        """Tell the other ranks that `error` ends the run on this one, and return the error to raise.

        Call this while `error` is being handled, before anything else. Outside of a run, it only names the failure of
        another rank that interrupted the teardown of the last run. `sys.exit(0)` exits with status 1.
        """
        trainer, rank = self._trainer, self._strategy.global_rank
        if trainer is None or not self.name:
            is_exit = isinstance(error, SystemExit) and not error.code and agreed_status() is None
            if is_exit and self._strategy.world_size > 1:
                sys.stderr.write(describe_exit(error, rank, "code outside of a run"))
            return as_consequence(error, self.why_interrupted)
        reported = as_consequence(error, self.why_interrupted)
        if self.watching is not None:
            failures, hangs = self.watching.failures, self.watching.hangs
            failures.leave()  # first: this thread must not be interrupted while it reports
            timed_out = isinstance(error, Exception) and explain_timeout(error, self.timeout, self._timeout_option)
            self.watching.watcher.leave(error)
            hangs.leave(error)
            if timed_out:
                error.add_note(hangs.where_all_are(f"A collective of rank {rank} timed out."))
            is_agreed = isinstance(error, SystemExit) and agreed_status() is not None
            reported = failures.report(error, describe_position(trainer, error), is_agreed=is_agreed)
        self._step = str(trainer.global_step) if reported is error else ""
        if not self._guards_hooks:
            self._guards_hooks = True
            self._guard_hooks(trainer, self._undo)
        return reported

    def report_death(self, rank: int, how: str) -> None:
        """Tell all ranks that a process has ended without an exception. Outside of a run, do nothing. For any thread.

        Args:
            rank: the global rank of the process.
            how: how it ended, such as `its process was killed by SIGKILL`.
        """
        if self.watching is not None:
            self.watching.failures.report_death(rank, how)

    # While Lightning calls the hooks for exceptions

    def _guard_hooks(self, trainer: Trainer, undo: ExitStack) -> None:
        """Let no hook that is called after an exception hide the exception, or leave the run without a teardown."""
        shadow_method(trainer, "save_checkpoint", partial(self._save_after_failure, trainer.save_checkpoint), undo)
        owners = [(each, "on_exception") for each in (*vars(trainer)["callbacks"], vars(trainer).get("datamodule"))]
        for owner, name in (*owners, *((logger, "finalize") for logger in trainer.loggers)):
            if owner is not None:
                shadow_method(owner, name, partial(self._call_hook, getattr(owner, name)), undo)

    def _call_hook(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a hook. If it cannot save, warn; after another error, end the run, because Lightning does not."""
        try:
            hook(*args, **kwargs)
        except CheckpointError as error:
            if self._strategy.global_rank == int(self._has_rank_0_died):
                warnings.warn(str(error), stacklevel=2)
        except BaseException as error:
            if self.watching is not None:
                remember_first(error, self.watching.failures.first)
                self._strategy.on_exception(error)
                self._strategy.teardown()
            raise

    @property
    def _has_rank_0_died(self) -> bool:
        first = None if self.watching is None else self.watching.failures.first.known
        return first is not None and first.has_died and first.rank == 0

    def _save_after_failure(self, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Save on the ranks that can. *Collective* over the ranks that raised together, if ranks hold shards.

        Raises:
            CheckpointError: it was not saved.
        """
        reason = ""
        try:
            if self.watching is not None:
                self.watching.failures.begin_save()
                if self._default_form == "sharded" and self.reachable() is None:
                    reason = (
                        "each rank holds a shard of the state, and not all ranks raised an error after the same "
                        "optimizer step."
                    )
                elif self._has_rank_0_died:
                    reason = "rank 0, which saves, has died."
            if not reason:
                save(filepath, *args, **kwargs)
                return
        except Exception as error:
            reason = explain(error)
        finally:
            if self.watching is not None:
                self.watching.failures.leave()
        raise CheckpointError(f"{filepath} was not saved after the failure: {reason} {self._newest_checkpoint()}")

    def _newest_checkpoint(self) -> str:
        trainer = self._trainer
        callbacks = [] if trainer is None else trainer.checkpoint_callbacks
        paths = [str(getattr(each, name, "")) for each in callbacks for name in ("last_model_path", "best_model_path")]
        newest = max(filter(os.path.exists, paths), key=os.path.getmtime, default=None)
        return "The run has saved no other checkpoint." if newest is None else f"The newest checkpoint is {newest}."

    def reachable(self) -> RankGroup | None:
        """Return all ranks; after a failure, `None`, or in a new group those that hold shards and raised together.

        The first call after a failure is *collective*, but returns if some rank does not call it.
        """
        if not dist.is_initialized() or dist.get_world_size() != self._strategy.world_size:
            return None
        if not self.is_failing or self.watching is None:
            return all_ranks()
        if self._reached is None:
            self._reached = (None,)
            if self._default_form == "sharded" and self.watching.failures.first.agree("step", self._step):
                with suppress(dist.DistError, RuntimeError):  # a rank has died since
                    name, ranks = f"after the failure of {self.name}", range(self._strategy.world_size)
                    # not an older group, in which collectives may be pending
                    group = new_named_group(name, ranks, timeout=self.timeout, backend="gloo")
                    self._reached = (all_ranks(group),)
        return self._reached[0]


def describe_position(trainer: Trainer, error: BaseException | None = None) -> str:
    """Return the part of the run that `trainer` is in, such as `training batch 3 of epoch 0 (global step 3)`.

    Args:
        trainer: the Trainer of the run.
        error: an error that ended the run. Its traceback shows whether the Trainer was saving a checkpoint.
    """
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    if "save_checkpoint" in functions:
        return f"saving a checkpoint at global step {trainer.global_step}"
    fn, stage = trainer.state.fn, trainer.state.stage
    if fn == TrainerFn.FITTING and stage == RunningStage.TRAINING and trainer.train_dataloader is not None:
        batch, epoch = trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch
        return f"training batch {max(0, batch)} of epoch {epoch} (global step {trainer.global_step})"
    if fn == TrainerFn.FITTING and stage is not None and stage != RunningStage.TRAINING:
        return f"{stage.value} during fit (global step {trainer.global_step})".replace("_", " ")
    return f"the setup of {fn.value}" if fn is not None else "the run"
