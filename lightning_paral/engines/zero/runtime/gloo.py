"""DeepSpeed's collectives on gloo, with a reduce-scatter and a reduce that send as little as in the ZeRO paper."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter, start_reduce

_ABANDON_TIMEOUT = timedelta(seconds=10)


class GlooBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's `torch.distributed` backend for gloo. All reductions are sums of CPU tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sending: list[tuple[Tensor, list[dist.Work]]] = []

    def reduce(self, tensor: Tensor, dst: int, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """Sum `tensor` on global rank `dst`. *Collective*.

        The other ranks return while they still send. They wait for their sends in the next all-reduce or all-gather.
        """
        group = group or dist.group.WORLD
        message = tensor.view(-1)
        target = dist.get_group_rank(group, dst)
        if dist.get_rank(group) != target:
            message = message.clone()  # DeepSpeed reuses the bucket before the send completes
        works = start_reduce(message, target, group)
        if works:
            self._sending.append((message, works))

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

    def all_gather_into_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the sends of earlier `reduce` calls, then call the method of `TorchBackend`. *Collective*."""
        self._finish_sending()
        return super().all_gather_into_tensor(*args, **kwargs)

    def _finish_sending(self) -> None:
        sending, self._sending = self._sending, []
        for _, works in sending:
            for work in works:
                work.wait()

    def abandon(self) -> None:
        """Wait, at the end of a run, for sends that no later collective has waited for.

        Gloo cancels a message whose `Work` is garbage-collected, and the receiving rank would hang. The wait has a
        timeout, because the receiving rank may have failed.
        """
        sending, self._sending = self._sending, []
        with suppress(RuntimeError):
            for work in [work for _, works in sending for work in works]:
                work.wait(_ABANDON_TIMEOUT)
