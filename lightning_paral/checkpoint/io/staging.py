"""Copy the data of a save to the host, so that training can change the originals while the copies are written."""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.checkpoint.io.arena import Arena, aligned
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import LocalShard, identity


class Staging:
    """Copies on the host of the shards that a rank writes.

    The memory is kept for the next save, because allocating it takes longer than copying to it.

    Args:
        pin: whether to pin the memory; useful if the tensors are on CUDA.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self.arena = Arena(pin=pin)

    def stage(self, items: list[WriteItem]) -> None:
        """Copy the local shards of `items`, and replace the shards by the copies. Earlier copies are overwritten."""
        local = [(item, sum(chunk.numel for chunk in item.shard.chunks)) for item in items if item.shard.chunks]
        self.arena.reserve(sum(aligned(numel * item.dtype.itemsize) for item, numel in local))
        streams = set()
        for item, numel in local:
            values = item.shard.values()
            copy = self.arena.take(numel, item.dtype).copy_(values, non_blocking=True)
            item.shard = LocalShard(item.shard.chunks, partial(identity, copy))
            if values.is_cuda:
                streams.add(torch.cuda.current_stream(values.device))
        for stream in streams:
            stream.synchronize()

    def release(self) -> None:
        """Free the memory."""
        self.arena.release()


def copy_to_host(tree: Any) -> Any:
    """Return `deepcopy(tree)` with all tensors on the host. The copies use no GPU memory."""
    with _DeepcopyToHost():
        return deepcopy(tree)


class _DeepcopyToHost(TorchFunctionMode):
    """Makes `deepcopy` copy tensors on other devices to the host. Copies share memory if the originals do."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and type(args[0]) in (Tensor, Parameter) and self.needs_copy(args[0]):
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._copy(tensor)
                vars(memo[id(tensor)]).update(deepcopy(vars(tensor), memo))
            return memo[id(tensor)]
        if func is Tensor.clone and self.needs_copy(args[0]):  # called by `Parameter.__deepcopy__`
            return args[0].to("cpu", copy=True)
        return func(*args, **(kwargs or {}))

    def needs_copy(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has to be copied to the host."""
        return tensor.device.type not in ("cpu", "meta")

    @torch.no_grad()
    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            copy = tensor.detach().to("cpu", copy=True)
        else:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = _copy_of(storage)
            copy = torch.empty(0, dtype=tensor.dtype)
            copy.set_(self._storages[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, Parameter):
            return Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)


def _copy_of(storage: Any) -> torch.UntypedStorage:
    copy: Any = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copied: torch.UntypedStorage = copy.copy_(storage)
    return copied
