"""DeepSpeed's collectives on gloo, with a reduce-scatter and a reduce that cost what ZeRO's paper says they do."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter, start_reduce

_PATIENCE = timedelta(seconds=10)


class GlooBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's backend over `torch.distributed`, for sums of tensors on CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sending: list[tuple[Tensor, list[dist.Work]]] = []

    def reduce(self, tensor: Tensor, dst: int, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """Add `tensor` on global rank `dst`; what other ranks still send is waited for in the next other collective."""
        group = group or dist.group.WORLD
        message = tensor.view(-1)
        target = dist.get_group_rank(group, dst)
        if dist.get_rank(group) != target:
            message = message.clone()  # the bucket is filled anew while this is on its way
        works = start_reduce(message, target, group)
        if works:
            self._sending.append((message, works))

    def reduce_scatter_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """Write this rank's part of the sum of `input_tensor` to `output_tensor`."""
        world: Any = dist.group.WORLD
        direct_reduce_scatter(output_tensor, input_tensor, group or world)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch."""
        self._finish_sending()
        return super().all_reduce(*args, **kwargs)

    def all_gather_into_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch."""
        self._finish_sending()
        return super().all_gather_into_tensor(*args, **kwargs)

    def _finish_sending(self) -> None:
        sending, self._sending = self._sending, []
        for _, works in sending:
            for work in works:
                work.wait()

    def abandon(self) -> None:
        """Let what is still on its way arrive, where a run ended before the collective that would wait for it.

        Gloo takes back a message whose work is dropped; the rank that waits for it would wait in vain. Ranks that
        failed alone are not waited for long.
        """
        sending, self._sending = self._sending, []
        with suppress(RuntimeError):
            for work in [work for _, works in sending for work in works]:
                work.wait(_PATIENCE)
