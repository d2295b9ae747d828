"""The collectives of a run. After an exception they do not wait for ranks that may never join."""

import atexit
import uuid
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_paral.comm.rows import gather_rows
from lightning_paral.compat.torch.process_groups import abort_nccl, call_on_mismatch, nccl_backends, use_default_timeout
from lightning_paral.distributed.failure import FailureWatch
from lightning_paral.distributed.hangs import DIFFERENT, Hangs
from lightning_paral.distributed.launcher import end_with_error
from lightning_paral.distributed.process_group import owned_group, release_process_group
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ProcessGroupError
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.strategies.after_failure import AfterFailure, describe_position
from lightning_paral.strategies.rank_agreement import restore_monitors, share_monitored


class Collectives(AfterFailure):
    """Mixin, placed before the Lightning base: barrier, broadcast and reduction, during a run and after an exception.

    After an exception they return the value of this rank, unless all ranks raised an error after the same step.
    """

    _undo_run: ExitStack | None = None
    """During a run, what undoes what holds for its duration only."""
    _logged_group: dist.ProcessGroup | None = None
    """During a run with several data ranks, the gloo group that reduces logged values on the CPU, if there is one."""

    def _begin_run(self) -> None:
        """Agree on a name for the run, by which ranks find each other after an exception. *Collective*."""
        self._reached, self._step = None, ""
        if self._undo_run is None:
            self._undo_run = ExitStack()
            self._undo_run.callback(use_default_timeout(self.timeout))
        if self.world_size > 1:
            self._begin_watching()
        else:
            self._run = uuid.uuid4().hex
        # In the group of the gradients, gloo would end the process if one rank reduces a value while another one
        # reduces a gradient.
        self._logged_group = (
            None if self.dims.data_size == 1 else self.dims.group_for_only("logged values", self.timeout)
        )
        assert self.lightning_module is not None
        if self.world_size > 1:
            share_monitored(self.lightning_module.trainer.checkpoint_callbacks, self.broadcast, self.root_device)

    def _begin_watching(self) -> None:
        """Agree on a name for the run, and start the watcher of this rank. *Collective*."""
        self._end_watching()
        self._run = self.broadcast(uuid.uuid4().hex)
        self._watcher = RankWatcher(self._run, self.timeout.total_seconds() + 5.0)
        self._failures = FailureWatch(self._watcher)
        self._watcher.add(self._failures)
        requeue = getattr(self.cluster_environment, "requeue_signal", None)  # of SLURM
        takes_signal = getattr(requeue, "name", "") != "SIGUSR2"
        self._hangs = Hangs(self._watcher, self.timeout, self._timeout_option, takes_signal=takes_signal)
        self._watcher.add(self._hangs)
        call_on_mismatch(self._end_after_mismatch)

    def _end_run(self) -> None:
        """End the run; after a failure with several ranks, release the process group, in which ranks may still wait."""
        try:
            self._end_watching()
        finally:
            self._forget_run()

    def _forget_run(self) -> None:
        if self._undo_guard is not None:
            self._undo_guard.close()
            self._undo_guard = None
        if self._undo_run is not None:
            self._undo_run.close()
            self._undo_run = None
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
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

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. *Collective*; nothing without a process group, or after a failure of some ranks."""
        reachable = self._reachable()
        if reachable is None:
            return
        on_cuda = self.root_device.type == "cuda" and reachable.group is None
        dist.barrier(group=reachable.group, device_ids=[self.root_device.index] if on_cuda else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the `obj` of rank `src`, or after a failure of some ranks that of this one. *Collective*."""
        reachable = self._reachable()
        if reachable is None:
            return obj
        objects = [obj]
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
                samples of logged values. After a failure of some ranks, `tensor` is unchanged.
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
        return dims.data_group()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether `decision` is true on all ranks or, with `all=False`, on any. *Collective* over all ranks."""
        reachable = self._reachable()
        if reachable is None:
            return decision
        if reachable.group is None and self.dims.data_size == self.dims.num_ranks:
            return bool(super().reduce_boolean_decision(decision, all))
        # Lightning compares a sum over the data ranks with the world size.
        decisions = reachable.gather(bool(decision))
        return False not in decisions if all else True in decisions

    def on_exception(self, exception: BaseException) -> None:
        """Abort NCCL: a rank that failed in a step leaves work on its device that waits for the other ranks."""
        super().on_exception(exception)
        if self._may_hang and owned_group() is not None:
            abort_nccl()

    @property
    def _may_hang(self) -> bool:
        """Whether ranks may wait for each other on a device, where no exception interrupts them."""
        return self.world_size > 1 and bool(nccl_backends())
