"""The collectives of a run. After an exception they do not wait for ranks that may never join."""

import atexit
import logging
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_paral.comm.rows import gather_rows
from lightning_paral.compat.torch.aborting import abort_nccl, call_on_mismatch, nccl_backends
from lightning_paral.compat.torch.group_timeouts import use_default_timeout
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.distributed.failures.departures import end_with_error
from lightning_paral.distributed.failures.failure import as_consequence, remember_first
from lightning_paral.distributed.failures.failure_watch import FailureWatch
from lightning_paral.distributed.failures.liveness import LivenessOfOthers, LivenessOfRankZero
from lightning_paral.distributed.failures.reachable import new_run_name
from lightning_paral.distributed.hangs import DIFFERENT, Hangs
from lightning_paral.distributed.launching.launcher import CheckedSubprocessLauncher
from lightning_paral.distributed.process_group import explain_timeout, group_for, owned_group, release_process_group
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ProcessGroupError
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.strategies.after_failure import AfterFailure
from lightning_paral.strategies.exception_hooks import end_run_if_hooks_fail
from lightning_paral.strategies.position import describe_position
from lightning_paral.strategies.rank_agreement import restore_monitors, share_monitored
from lightning_paral.strategies.save_on_exception import replace_on_exception, restore_on_exception

log = logging.getLogger(__name__)


class Collectives(AfterFailure):
    """Mixin, placed before the Lightning base: barrier, broadcast and reduction, during a run and after an exception.

    The first collective after an exception finds out which ranks failed as well. Those at the same step continue in a
    new process group, in which callbacks can save. No rank waits for ranks that died.
    """

    _watcher: RankWatcher | None = None
    """During a run with several ranks, the thread that exchanges messages with the other ranks."""
    _hangs: Hangs | None = None
    """During a run with several ranks, what asks all ranks where they are."""
    _undo_run: ExitStack | None = None
    """During a run, what undoes what holds for its duration only."""
    _logged_group: dist.ProcessGroup | None = None
    """During a run with several data ranks, the gloo group that reduces logged values on the CPU, if there is one."""
    _why_interrupted: str = ""
    """From the teardown until the next run, names the failure of another rank that ended the run; empty if none did."""
    _undo_guard: ExitStack | None = None
    """After a failure, what removes the guard of the hooks that are called then."""
    num_runs: int = 0
    """The number of runs for which the ranks have joined."""

    def _begin_run(self) -> None:
        """Agree on a name for the run, by which ranks find each other after an exception. *Collective*."""
        self._reached = None
        self.num_runs += 1
        if self._undo_run is None:
            self._undo_run = ExitStack()
            self._undo_run.callback(use_default_timeout(self.timeout))
        if self.world_size > 1:
            self._begin_watching()
        else:
            self._run = new_run_name()
        # In the group of the gradients, gloo would end the process if one rank reduces a value while another one
        # reduces a gradient.
        self._logged_group = (
            None if self.dims.data_size == 1 else self.dims.group_for_only("logged values", self.timeout)
        )
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        replace_on_exception(callbacks, self._save_on_exception)
        if self.world_size > 1:
            share_monitored(callbacks, self.broadcast, self.root_device)
        if self._is_fit:
            self._begin_tracking(self.lightning_module.trainer)

    def _begin_watching(self) -> None:
        """Agree on a name for the run, and start the watcher of this rank. *Collective*."""
        self._end_watching()
        assert self.cluster_environment is not None
        main_address, main_port = self.cluster_environment.main_address, self.cluster_environment.main_port
        of_others = LivenessOfOthers(main_address) if self.global_rank == 0 else None
        self._run, address = self.broadcast((new_run_name(), of_others.address if of_others else ""))
        launcher = self.launcher
        how = launcher.describe_end if isinstance(launcher, CheckedSubprocessLauncher) else None
        liveness = of_others or LivenessOfRankZero(self.global_rank, address)
        self._watcher = RankWatcher(self._run, self.timeout.total_seconds() + 5.0)
        self._failures = FailureWatch(
            self._watcher, main_port, liveness, how, save_seconds=self.timeout.total_seconds()
        )
        self._watcher.add(self._failures)
        requeue = getattr(self.cluster_environment, "requeue_signal", None)  # of SLURM
        takes_signal = getattr(requeue, "name", "") != "SIGUSR2"
        self._hangs = Hangs(self._watcher, self.timeout, self._timeout_option, takes_signal=takes_signal)
        self._watcher.add(self._hangs)
        call_on_mismatch(self._end_after_mismatch)

    def report_failure(self, error: BaseException) -> BaseException:
        """Tell the other ranks that `error` ends the run on this one, and return the error to raise.

        Call this while `error` is being handled, before anything else. Outside of a run, it only names the failure of
        another rank that interrupted the teardown of the last run.
        """
        trainer = trainer_of(self.lightning_module)
        if self._failures is None or trainer is None:
            return as_consequence(error, self._why_interrupted)
        self._failures.leave()  # first: this thread must not be interrupted while it reports
        timed_out = isinstance(error, Exception) and explain_timeout(error, self.timeout, self._timeout_option)
        if self._watcher is not None and self._hangs is not None:
            self._watcher.leave(error)
            self._hangs.leave(error)
            if timed_out:
                error.add_note(self._hangs.where_all_are(f"A collective of rank {self.global_rank} timed out."))
        reported = self._failures.report(error, describe_position(trainer, error))
        if self._undo_guard is None:
            self._undo_guard = end_run_if_hooks_fail(trainer, self._end_after_hook)
        return reported

    def _end_after_hook(self, error: BaseException) -> None:
        """End the run after a hook for exceptions raised `error`, which Lightning raises instead of the run's error."""
        if self._failures is not None:
            remember_first(error, self._failures.first)
        self.on_exception(error)
        self.teardown()

    def _end_run(self) -> None:
        """End the run; after a failure with several ranks, release the process group, in which ranks may still wait."""
        with ExitStack() as at_end:
            at_end.callback(self._forget_run)
            at_end.callback(self._end_watching)
            self._end_tracking()
            self._wait_for_savers()

    def _forget_run(self) -> None:
        if self._undo_guard is not None:
            self._undo_guard.close()
            self._undo_guard = None
        if self._undo_run is not None:
            self._undo_run.close()
            self._undo_run = None
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            restore_on_exception(trainer.checkpoint_callbacks)
            restore_monitors(trainer.checkpoint_callbacks)
            if trainer.state.status == TrainerStatus.INTERRUPTED and self.world_size > 1:
                release_process_group(after_failure=True)
        self._run, self._reached, self._logged_group = "", None, None

    def _end_watching(self) -> None:
        call_on_mismatch(None)
        if self._watcher is not None:
            self._watcher.end()
            self._watcher = None
        if self._hangs is not None:
            self._hangs.end()
            self._hangs = None
        if self._failures is not None:
            self._failures.end()
            self._why_interrupted = self._failures.first.why_interrupted()
            self._failures = None

    def end_hung_run(self, why: str, remedy: str = "") -> None:
        """End the run on all ranks, wherever they wait, with an error that says where. Call this in a thread.

        Args:
            why: a sentence about why the run ends, which comes before where the ranks are.
            remedy: what to do, which comes after it.
        """
        hangs, failures, trainer = self._hangs, self._failures, trainer_of(self.lightning_module)
        if hangs is not None and failures is not None and trainer is not None:
            where = hangs.where_all_are(why)
            error = ProcessGroupError(where if remedy in where else f"{where} {remedy}")
            failures.end_with(error, describe_position(trainer))

    def _end_after_mismatch(self) -> None:
        atexit.register(end_with_error)  # otherwise Python would wait for gloo's thread when it exits
        self.end_hung_run("A rank sent more to another one than its collective takes.", DIFFERENT)

    @property
    def is_in_run(self) -> bool:
        """Whether the ranks have joined, and the run has not ended."""
        return bool(self._run)

    @property
    def _is_running(self) -> bool:
        return self.is_in_run

    def _reachable(self) -> RankGroup | None:
        """Return the ranks that can be reached; `None` if there are no others, or no process group."""
        if not dist.is_initialized() or dist.get_world_size() != self.world_size or not self._may_save:
            return None
        ranks = self._ranks()
        return None if ranks.world_size == 1 and ranks.members else ranks

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, or after a failure for those that save. *Collective*; nothing without a process group."""
        reachable = self._reachable()
        if reachable is None:
            return
        on_cuda = self.root_device.type == "cuda" and reachable.group is None
        dist.barrier(group=reachable.group, device_ids=[self.root_device.index] if on_cuda else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the `obj` of rank `src`. *Collective* over all ranks, or after a failure over those that save.

        If rank `src` has died, the first of the ranks that save takes its place.
        """
        reachable = self._reachable()
        if reachable is None:
            return obj
        objects = [obj]
        if reachable.members and src not in reachable.members:
            src = reachable.members[0]
        dist.broadcast_object_list(objects, src, group=reachable.group)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` over the ranks, in place, and return it. *Collective* over `group`.

        Unlike Lightning's method, this one averages CPU tensors in CUDA runs as well, and has no extra barrier.

        Args:
            tensor: a tensor of any dtype, on the CPU or on this rank's device. Other objects are returned unchanged.
            group: the process group; `None` means all data ranks.
            reduce_op: `"mean"`, a `ReduceOp`, or the name of one.

        Returns:
            Any: `tensor`. For the mean of integers, a new floating-point tensor, which Lightning needs to count the
                samples of logged values. If this rank does not save after a failure, `tensor` is unchanged.
        """
        reachable = self._reachable() if isinstance(tensor, Tensor) else None
        if reachable is None:
            return tensor
        average = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        if average:
            operation = dist.ReduceOp.SUM  # gloo has no AVG
        else:
            operation = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        num_ranks = self.dims.data_size if group is None else dist.get_world_size(group)
        if group is None and reachable.group is not None:
            on_cpu = tensor.cpu()
            dist.all_reduce(on_cpu, op=operation, group=reachable.group)
            tensor.copy_(on_cpu)
            num_ranks = reachable.world_size
        else:
            dist.all_reduce(tensor, op=operation, group=self._group_for(tensor) if group is None else group)
        if average:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor / num_ranks
            tensor.div_(num_ranks)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of the ranks, stacked. *Collective* over `group`.

        Args:
            tensor: a tensor with the same shape on all ranks.
            group: the process group. `None` and the default group, which `LightningModule.all_gather` gives, mean all
                data ranks, so that each sample counts once.
            sync_grads: whether gradients flow to the tensors of all ranks.
        """
        is_default = dist.is_initialized() and group in (None, dist.group.WORLD)
        data_group = self.dims.data_group() if is_default else None
        if data_group is None:
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)
            return gathered
        # torch's own function confuses ranks of a group with global ranks in its backward pass on gloo (torch 2.13).
        return gather_rows((tensor if sync_grads else tensor.detach()).unsqueeze(0), data_group)

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the group of the data ranks that reduces `tensor`; `None` means the default group."""
        dims = self.dims
        if self._logged_group is not None and tensor.device.type == "cpu":
            return self._logged_group
        return group_for(tensor) if dims.data_size == dims.num_ranks else dims.data_group()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether `decision` is true on all ranks or, with `all=False`, on any. *Collective* over all ranks."""
        reachable = self._reachable()
        if reachable is None or (reachable.group is None and self.dims.data_size == self.dims.num_ranks):
            return bool(super().reduce_boolean_decision(decision, all)) if self._may_save else decision
        # Lightning compares a sum over the data ranks with the world size.
        decisions = reachable.gather(bool(decision))
        return False not in decisions if all else True in decisions

    def on_exception(self, exception: BaseException) -> None:
        """Abort NCCL: a rank that failed in a step leaves work on its device that waits for the other ranks."""
        super().on_exception(exception)
        if self._may_hang and owned_group() is not None:
            abort_nccl()

    @property
    def _timeout_option(self) -> str:
        return f"{type(self).__name__}(timeout=...)"

    @property
    def _may_hang(self) -> bool:
        """Whether ranks may wait for each other on a device, where no exception interrupts them."""
        return self.world_size > 1 and bool(nccl_backends())
