"""DeepSpeed's collectives on gloo, with a reduce-scatter and a reduce that send as little as in the ZeRO paper."""

from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter, start_reduce

_ABANDON_TIMEOUT = timedelta(seconds=10)
_MAX_BYTES_IN_FLIGHT = 50 * 2**20
"""Two buckets of the default size. A rank that has more to send waits for its oldest send."""

_MAX_GATHERED_BYTES = 25 * 2**20
"""gloo holds a copy of what one call gathers."""


class GlooBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's `torch.distributed` backend for gloo. All reductions are sums of CPU tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sending: deque[tuple[Tensor, list[dist.Work]]] = deque()
        self._bytes_in_flight = 0

    def reduce(self, tensor: Tensor, dst: int, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """Sum `tensor` on global rank `dst`. *Collective*.

        The other ranks return while they still send, and compute meanwhile. They hold copies of what they send, of at
        most 50 MiB unless one message is larger. They wait for the last sends in the next all-reduce or all-gather.
        """
        group = group or dist.group.WORLD
        message = tensor.view(-1)
        target = dist.get_group_rank(group, dst)
        if dist.get_rank(group) != target:
            while self._sending and self._bytes_in_flight + message.nbytes > _MAX_BYTES_IN_FLIGHT:
                self._finish_oldest()  # gloo does not tell whether a send has completed
            message = message.clone()  # DeepSpeed reuses the bucket before the send completes
        works = start_reduce(message, target, group)
        if works:
            self._sending.append((message, works))
            self._bytes_in_flight += message.nbytes

    def reduce_scatter_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """Write this rank's chunk of the sum of `input_tensor` over the ranks to `output_tensor`. *Collective*."""
        world: Any = dist.group.WORLD
        direct_reduce_scatter(output_tensor, input_tensor, group or world)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the sends of earlier `reduce` calls, then call the method of `TorchBackend`. *Collective*."""
        self._finish_sending()
        return super().all_reduce(*args, **kwargs)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Gather `input_tensor` of all ranks into `output_tensor`, of which it may be a part. *Collective*.

        Waits for the sends of earlier `reduce` calls first. gloo copies what it gathers, so a large tensor, such as all
        weights at stages 1 and 2, is gathered in pieces.
        """
        self._finish_sending()
        size = output_tensor.nbytes
        if (
            async_op
            or size <= _MAX_GATHERED_BYTES
            or not (output_tensor.is_contiguous() and input_tensor.is_contiguous())
        ):
            return super().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        own = input_tensor.view(-1)
        parts = output_tensor.view(-1).chunk(dist.get_world_size(group or dist.group.WORLD))
        length = -(-own.numel() * _MAX_GATHERED_BYTES // size)
        for start in range(0, own.numel(), length):
            piece = slice(start, start + length)
            dist.all_gather([part[piece] for part in parts], own[piece], group)
        return None

    def _finish_sending(self) -> None:
        while self._sending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        message, works = self._sending.popleft()
        self._bytes_in_flight -= message.nbytes
        for work in works:
            work.wait()

    def abandon(self) -> None:
        """Wait, at the end of a run, for sends that no later collective has waited for.

        Gloo cancels a message whose `Work` is garbage-collected, and the receiving rank would hang. The wait has a
        timeout, because the receiving rank may have failed.
        """
        sending, self._sending = self._sending, deque()
        self._bytes_in_flight = 0
        with suppress(RuntimeError):
            for work in [work for _, works in sending for work in works]:
                work.wait(_ABANDON_TIMEOUT)
