"""A DDP communication hook that averages gradient buckets with one of our all-reduce functions.

Each bucket is reduced while the backward pass computes the next ones: on CPU in a separate thread, on CUDA on a
separate stream. See torch/nn/parallel/distributed.py, `register_comm_hook`.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.comm.reduction import AllReduce


class BucketReducer:
    """Averages gradient buckets over a group, one after the other, concurrently with the backward pass.

    Args:
        all_reduce: the all-reduce function.
        group: the ranks whose gradients are averaged.
        device: the device of the gradients.
        wire_dtype: the floating-point dtype of the messages; `None` for that of the gradients.
    """

    def __init__(
        self, all_reduce: AllReduce, group: dist.ProcessGroup, device: torch.device, wire_dtype: torch.dtype | None
    ) -> None:
        self._all_reduce = all_reduce
        self._group = group
        self._wire_dtype = wire_dtype
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            # One thread: buckets are reduced in the order they become ready, which is the same on all ranks.
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paral-all-reduce")

    def register(self, model: DistributedDataParallel) -> None:
        """Make `model` pass its gradient buckets to this reducer."""
        model.register_comm_hook(state=self, hook=_reduce_bucket)

    def start(self, gradients: Tensor) -> "torch.futures.Future[Tensor]":
        """Start averaging `gradients` in place, and return a future of the result. *Collective* over the group."""
        return self._start_on_stream(gradients) if self._thread is None else self._start_in_thread(gradients)

    def shutdown(self) -> None:
        """Release the thread without waiting for it. A reduction that hangs ends when its process group times out."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _average(self, gradients: Tensor) -> Tensor:
        return self._all_reduce(gradients, self._group, op=dist.ReduceOp.AVG, wire_dtype=self._wire_dtype)

    def _start_in_thread(self, gradients: Tensor) -> "torch.futures.Future[Tensor]":
        assert self._thread is not None
        done: torch.futures.Future[Tensor] = torch.futures.Future()

        def reduce() -> None:
            try:
                done.set_result(self._average(gradients))
            except BaseException as error:  # the training thread waits for `done`: pass every exception on
                done.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(reduce)
        return done

    def _start_on_stream(self, gradients: Tensor) -> "torch.futures.Future[Tensor]":
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradients.device])
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(self._stream):
            gradients.record_stream(self._stream)
            done.set_result(self._average(gradients))
        return done


def _reduce_bucket(reducer: BucketReducer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    return reducer.start(bucket.buffer())
