"""Send nested values with tensors from one rank to another, in order."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.point_to_point import record_sent
from lightning_paral.compat.torch.tensors import tree_flatten, tree_map_only, tree_unflatten


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the description of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Channel:
    """One direction between this rank and another rank of `group`, which creates the opposite end.

    A message consists of a number, a description of the values if it differs from that of the message before, and the
    tensors. Shapes may therefore change from message to message, and cost nothing while they do not.

    Between CPUs, a transfer begins when the receive is posted, and takes milliseconds while all cores are busy. After
    `expect`, receives are therefore posted ahead, for tensors like those of the message before. On CUDA they are not,
    because a receive occupies the device until the tensors arrive.

    Args:
        group: a process group that only this direction uses: NCCL matches messages by their order.
        peer: the global rank at the other end.
        device: the device of the tensors on this rank.
        tag: tells the messages of channels apart that share a direction. NCCL ignores it, so both ends must use these
            channels in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, tag: int = 0) -> None:
        self._group = group
        self._tag = tag
        self._peer = peer
        self._device = device
        self._description = b""
        self._values: Any = None
        self._unfinished: list[tuple[dist.Work, Tensor]] = []
        self._posts_ahead = device.type == "cpu"
        self._num_expected = self._num_done = 0
        self._is_next_posted = False
        self._posted: Callable[[], list[Tensor]] | None = None

    def expect(self, num_messages: int) -> None:
        """Allow posting receives ahead for this number of messages, which begin with the next one.

        Both ends of the channel must call it with the same number.
        """
        self._num_expected, self._num_done = num_messages, 0

    def post_next(self, *, receives: bool) -> None:
        """Post the receive of the next message now, for tensors like those of the message before, if there was one.

        Both ends must call it.

        Args:
            receives: whether this end receives.
        """
        self._is_next_posted = self._posts_ahead and self._values is not None
        if receives and self._is_next_posted:
            self._post_message()

    def send(self, values: Any) -> None:
        """Send nested `values`, whose leaves are tensors and objects that can be pickled. Does not wait."""
        described = tree_map_only(Tensor, TensorSpec.of, values)
        description = pickle.dumps(described)
        is_new = description != self._description
        self._post(torch.tensor([len(description) if is_new else 0], dtype=torch.int64, device="cpu"))
        is_posted = self._is_next_posted or (self._posts_ahead and 0 < self._num_done < self._num_expected)
        self._is_next_posted = False
        self._num_done += 1
        if is_new:
            if is_posted:  # for tensors of the last message's shapes
                self.send_tensors([spec.empty(self._device) for spec in self._specs()])
            self._values = described
            self._description = description
            self._post(torch.frombuffer(bytearray(description), dtype=torch.uint8))
        self.send_tensors([leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)])

    def receive(self) -> tuple[Any, list[Tensor]]:
        """Return the next values, with a `TensorSpec` in place of each tensor, and the tensors."""
        if self._posted is None:
            (size,) = self._receive([torch.zeros(1, dtype=torch.int64, device="cpu")])
            tensors = None
        else:
            size, *tensors = self._posted()
        if size.item():
            (data,) = self._receive([torch.empty(int(size), dtype=torch.uint8, device="cpu")])
            self._values = pickle.loads(data.numpy().tobytes())
            tensors = None
        if tensors is None:
            tensors = self.receive_tensors(self._specs())
        self._num_done += 1
        self._posted = None
        if self._posts_ahead and self._num_done < self._num_expected:
            self._post_message()
        return self._values, tensors

    def _post_message(self) -> None:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._posted = self._post_receives([size, *(spec.empty(self._device) for spec in self._specs())])

    def _specs(self) -> list[TensorSpec]:
        return [leaf for leaf in tree_flatten(self._values)[0] if isinstance(leaf, TensorSpec)]

    def send_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Send `tensors`, whose shapes the other rank knows. Does not wait."""
        for tensor in tensors:
            if tensor.numel():
                self._post(tensor.detach().to(self._device).contiguous())
                record_sent(tensor.numel() * tensor.element_size())

    def receive_tensors(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Return tensors that the other rank has sent with `send_tensors`."""
        return self._receive([spec.empty(self._device) for spec in specs])

    def post_tensors(self, specs: Sequence[TensorSpec]) -> Callable[[], list[Tensor]]:
        """Return a function that returns what `receive_tensors` does. Receives may begin now, in the order of calls."""
        if not self._posts_ahead or self._num_done >= self._num_expected:
            return partial(self.receive_tensors, specs)
        self._num_done += 1
        return self._post_receives([spec.empty(self._device) for spec in specs])

    def _receive(self, tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            if tensor.numel():
                dist.recv(tensor.view(-1).view(torch.uint8), self._peer, group=self._group, tag=self._tag)
        return tensors

    def _post_receives(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        works = [dist.irecv(each, self._peer, group=self._group, tag=self._tag) for each in flat]

        def wait() -> list[Tensor]:
            for work in works:
                assert work is not None
                work.wait()
            return tensors

        return wait

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._unfinished:
            work.wait()
        self._unfinished.clear()

    def _post(self, tensor: Tensor) -> None:
        self._unfinished = [(work, sent) for work, sent in self._unfinished if not work.is_completed()]
        work = dist.isend(tensor.view(-1).view(torch.uint8), self._peer, group=self._group, tag=self._tag)
        assert work is not None
        self._unfinished.append((work, tensor))


def with_tensors(values: Any, tensors: Sequence[Tensor]) -> Any:
    """Return `values` of a message with `tensors` in place of the descriptions."""
    leaves, structure = tree_flatten(values)
    remaining = iter(tensors)
    return tree_unflatten([next(remaining) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves], structure)
