"""Handle tensors that every rank holds in full: those that FSDP2 cannot shard, and those of a unit before sharding."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.dtensor_chunks import ranks_with_same_chunk
from lightning_paral.comm.broadcast import broadcast
from lightning_paral.comm.grouping import group_by_dtype_and_device
from lightning_paral.compat.torch.autograd import call_at_end_of_backward
from lightning_paral.compat.torch.fsdp import can_be_sharded
from lightning_paral.distributed.exchange import digest_of

_DATA: Any = Tensor.data


def unshardable_parameters(module: Module, num_shards: int) -> list[Parameter]:
    """Return the parameters of `module` that cannot be sharded: 0-dimensional and empty ones, and uneven complex ones.

    Before torch 2.12, integer parameters cannot be sharded either.
    """

    def cannot_be_sharded(parameter: Parameter) -> bool:
        is_empty = parameter.dim() == 0 or parameter.numel() == 0
        # torch's Adam steps on `view_as_real`, which is a copy of a DTensor with uneven shards (torch 2.13).
        is_uneven = parameter.is_complex() and not is_empty and parameter.shape[0] % num_shards > 0
        return is_empty or not (isinstance(parameter, DTensor) or (can_be_sharded(parameter) and not is_uneven))

    return [parameter for parameter in module.parameters() if cannot_be_sharded(parameter)]


def local_replicas(module: Module) -> dict[str, tuple[Tensor, int]]:
    """Return by name the tensors of this rank of which other ranks hold replicas, each with a number.

    The number is 0 for a parameter in full, which all ranks hold. Otherwise it is equal on the ranks that hold the same
    chunk, and different for other sets of ranks.
    """
    replicas: dict[str, tuple[Tensor, int]] = {}
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            replicas[name] = parameter, 0
        elif len(ranks := ranks_with_same_chunk(parameter)) > 1:
            replicas[name] = parameter.to_local(), digest_of(ranks)
    return replicas


class ReplicatedParameter(Parameter):
    """A parameter that is not sharded, but whose `data` may be assigned a DTensor."""

    @property
    def data(self) -> Tensor:
        """Its values, without autograd."""
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        # If an ordinary parameter holds a DTensor, its next use crashes the process (torch 2.13).
        _DATA.__set__(self, value.full_tensor().detach() if isinstance(value, DTensor) else value)


def allow_dtensor_assignment(parameters: Iterable[Parameter]) -> Callable[[], None]:
    """Allow DTensors to be assigned to the `data` of `parameters`; return a function that undoes this."""
    watched = [parameter for parameter in parameters if type(parameter) is Parameter]
    for parameter in watched:
        parameter.__class__ = ReplicatedParameter

    def end() -> None:
        for parameter in watched:
            parameter.__class__ = Parameter

    return end


class AveragedGradients:
    """Averages the gradients of replicated parameters over the data ranks at the end of each backward pass.

    It uses one all-reduce per dtype and device. Backward passes that only accumulate are averaged as well: averaging
    equal values again, in a later pass, changes nothing.

    Args:
        parameters: the parameters that are replicated on the data ranks.
        num_ranks: the number of data ranks.
        group: the process group of the data ranks; `None` for the world.
    """

    def __init__(self, parameters: list[Parameter], num_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._num_ranks = num_ranks
        self._group = group
        parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        self._parameters = parameters
        self._queued = False
        self._handles = [_register_gradient_hook(parameter, self._queue_average) for parameter in parameters]

    def remove(self) -> None:
        """Stop averaging."""
        for handle in self._handles:
            handle.remove()

    def _queue_average(self, parameter: Tensor) -> None:
        if isinstance(parameter.grad, DTensor):  # of a loss that is computed from shards alone, such as a penalty
            parameter.grad = parameter.grad.full_tensor()
        if self._num_ranks > 1 and not self._queued:
            self._queued = True
            call_at_end_of_backward(self._average)

    def _average(self) -> None:
        self._queued = False
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for similar in group_by_dtype_and_device(gradients):
            flat = torch.cat([gradient.view(-1) for gradient in similar])
            dist.all_reduce(flat, group=self._group)
            flat.div_(self._num_ranks)
            for gradient, averaged in zip(similar, torch.split(flat, [g.numel() for g in similar]), strict=True):
                gradient.copy_(averaged.view_as(gradient))


def _register_gradient_hook(parameter: Parameter, hook: object) -> torch.utils.hooks.RemovableHandle:
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks on frozen parameters; this one may be unfrozen later
    handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)
    return handle


def broadcast_on(device: torch.device, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast a unit's `tensors` from the first rank of `group` on `device`, before the unit is sharded there.

    This communicates over the network of the devices, and needs no more device memory than FSDP2 needs for the unit.

    *Collective* over `group`; `None` is the world.
    """
    tensors = list(tensors)
    move_or_allocate(device, tensors, is_source=dist.get_rank(group) == 0)
    broadcast(tensors, group)


@torch.no_grad()
def move_or_allocate(device: torch.device, tensors: Iterable[Tensor], *, is_source: bool) -> None:
    """Move `tensors` to `device` if this rank is the source. Otherwise only allocate memory there for their values.

    Parameters are reallocated on the other ranks even if `device` is the CPU, because `from_pretrained` may have mapped
    them privately from a file. A page of such a mapping, once written to, stays in memory as long as the file is
    mapped, so that each rank would end up with the full model in memory.
    """
    for tensor in tensors:
        if is_source:
            tensor.data = tensor.data.to(device)
        elif device.type != "cpu" or isinstance(tensor, Parameter):
            tensor.data = torch.empty_like(tensor.data, device=device)
