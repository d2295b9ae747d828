"""Collectives of a run. After an exception they do not wait for ranks that may never join."""

import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import MethodType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_paral.compat.torch.aborting import abort_nccl, nccl_backends
from lightning_paral.distributed.agreement import RankGroup, all_ranks
from lightning_paral.distributed.failure import ReachableRanks, new_run_name, wait_for_all_ranks
from lightning_paral.distributed.process_group import explain_timeout, group_for, owned_group, release_process_group
from lightning_paral.distributed.timeout_watch import TimeoutWatch
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.strategies.description import StrategyDescription

log = logging.getLogger(__name__)


class _OnException:
    """Replaces `on_exception` of one callback during a run. A copy of the callback gets the method of its class."""

    def __init__(self, save: Callable[..., None], callback: Callback) -> None:
        self._save = save
        self._callback = callback

    def __call__(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the callback save, if all ranks failed."""
        self._save(self._callback, trainer, pl_module, exception)

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodType, (type(self._callback).on_exception, self._callback)


class Collectives(StrategyDescription):
    """Mixin, placed before the Lightning base: barrier, broadcast and reduction, during a run and after an exception.

    After an exception, each rank finds out once whether all ranks failed, when it first needs the others. If so, they
    continue in a new process group, in which callbacks can save. If not, no rank waits for another, and nothing is
    written.
    """

    _run: str = ""
    """The name of the run, the same on all ranks; empty outside of runs."""
    _reached: ReachableRanks | None = None
    timeout: timedelta
    """How long ranks wait for each other, when joining and in every collective."""
    _watch: TimeoutWatch | None = None
    _is_reported: bool = False

    def _begin_run(self) -> None:
        """Agree on a name of the run, by which ranks find each other after an exception. *Collective*."""
        self._reached, self._is_reported = None, False
        if self._watch is None and nccl_backends():
            self._watch = TimeoutWatch(self.timeout, self._timeout_option)
        self._run = self.broadcast(new_run_name())
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.checkpoint_callbacks:
            if getattr(callback, "save_on_exception", True):
                vars(callback)["on_exception"] = _OnException(self._save_on_exception, callback)

    def _end_run(self) -> None:
        """End the run; after a failure with several ranks, which may be in any collective, the process group, too."""
        self._end_watch()
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            for callback in trainer.checkpoint_callbacks:
                vars(callback).pop("on_exception", None)
            if trainer.state.status == TrainerStatus.INTERRUPTED and self.world_size > 1:
                release_process_group(after_failure=True)
        self._run, self._reached = "", None

    @property
    def _is_failing(self) -> bool:
        """Whether an exception has ended the run, and the teardown has not ended."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and bool(self._run) and trainer.state.status == TrainerStatus.INTERRUPTED

    def _reachable_ranks(self) -> ReachableRanks:
        """Return whether all ranks can be reached. *Collective* once, after an exception; yes without one."""
        if not self._is_failing or not dist.is_initialized():
            return ReachableRanks(all_reachable=True)
        if self._reached is None:
            self._reached = wait_for_all_ranks(self._run, self.timeout)
        return self._reached

    def _ranks(self) -> RankGroup:
        """Return the ranks that save together."""
        return all_ranks(self._reachable_ranks().group)

    @property
    def _is_running(self) -> bool:
        return bool(self._run)

    def _save_on_exception(
        self, callback: Callback, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        """Let `callback` save if all ranks failed. If it cannot, warn: the exception to raise is the one of the run."""
        self._report(exception)
        try:
            if self._reachable_ranks().all_reachable:
                type(callback).on_exception(callback, trainer, module, exception)
            else:
                self._warn_of_others(f"{type(callback).__name__} saved no checkpoint")
        except Exception as error:
            rank_zero_warn(f"{type(callback).__name__} could not save on {type(exception).__name__}: {error}")

    def _warn_of_others(self, what: str) -> None:
        # On every rank: rank 0 may not be here.
        warnings.warn(
            f"{what} on rank {self.global_rank}: the run failed on some of its {self.world_size} ranks only, and all "
            "of them have to save together.",
            stacklevel=2,
        )

    def _reachable(self) -> ReachableRanks | None:
        """Return the ranks if all are reachable; `None` otherwise, or without a process group of the run."""
        reachable = self._reachable_ranks()
        if not dist.is_initialized() or not reachable.all_reachable or dist.get_world_size() != self.world_size:
            return None
        return reachable

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. *Collective*; does nothing without a process group, or if only some ranks failed."""
        reachable = self._reachable()
        if reachable is None:
            return
        on_cuda = self.root_device.type == "cuda" and reachable.group is None
        dist.barrier(group=reachable.group, device_ids=[self.root_device.index] if on_cuda else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the `obj` of rank `src`. *Collective*; returns `obj` itself if only some ranks failed."""
        reachable = self._reachable()
        if reachable is None:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src, group=reachable.group)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` over the ranks, in place, and return it. *Collective* over `group`.

        Unlike Lightning's, this also averages CPU tensors in a CUDA run, and has no extra barrier.

        Args:
            tensor: of any dtype, on the host or this rank's device; anything but a tensor is returned unchanged.
            group: the ranks; `None` means all data ranks.
            reduce_op: `"mean"`, or a `ReduceOp` or its name.

        Returns:
            Any: `tensor`; for the mean of integers a new, floating-point tensor, with which Lightning counts the
                samples behind what is logged. If only some ranks failed, `tensor` is unchanged.
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
            on_host = tensor.cpu()
            dist.all_reduce(on_host, op=operation, group=reachable.group)
            tensor.copy_(on_host)
            num_ranks = self.dims.num_ranks
        else:
            dist.all_reduce(tensor, op=operation, group=self._group_for(tensor) if group is None else group)
        if average:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor / num_ranks
            tensor.div_(num_ranks)
        return tensor

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the group of the data ranks that carries `tensor`; `None` means the default group."""
        dims = self.dims
        return group_for(tensor) if dims.data_size == dims.num_ranks else dims.data_group()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether `decision` is true on all ranks or, with `all=False`, on any. *Collective* over all ranks."""
        reachable = self._reachable()
        if reachable is None or self.dims.data_size == self.dims.num_ranks:
            return bool(super().reduce_boolean_decision(decision, all))
        # Lightning compares a sum over the data ranks with the world size.
        decisions = all_ranks(reachable.group).gather(bool(decision))
        return False not in decisions if all else True in decisions

    def on_exception(self, exception: BaseException) -> None:
        """Name the option `timeout` in the error of a timed out collective; abort NCCL if only some ranks failed."""
        super().on_exception(exception)
        explain_timeout(exception, self.timeout, self._timeout_option)
        self._report(exception)
        if self._may_hang and owned_group() is not None and not self._reachable_ranks().all_reachable:
            self._end_watch()  # aborted communicators have an error
            abort_nccl()  # device work in the teardown would wait for the other ranks

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    @property
    def _timeout_option(self) -> str:
        return f"{type(self).__name__}(timeout=...)"

    @property
    def _may_hang(self) -> bool:
        """Whether ranks may wait for each other on a device, which no exception interrupts."""
        return self.world_size > 1 and bool(nccl_backends())

    def _report(self, exception: BaseException) -> None:
        """Log an exception now. The teardown, which runs before it is raised, may hang, or a launcher may kill it."""
        if self._may_hang and not self._is_reported and isinstance(exception, Exception):
            self._is_reported = True
            log.error("Rank %d of %d failed.", self.global_rank, self.world_size, exc_info=exception)
