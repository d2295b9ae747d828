"""Parameters that FSDP2 cannot shard, which every rank holds in full; and broadcasting a unit before it is sharded."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.comm.grouping import group_by_dtype_and_device
from lightning_paral.compat.torch.backward import call_at_end_of_backward
from lightning_paral.compat.torch.fsdp_param import can_be_sharded

_DATA: Any = Tensor.data


def unshardable(module: Module) -> list[Parameter]:
    """Return the parameters of `module` that cannot be sharded: 0-dimensional and empty ones.

    Before torch 2.12, also integer ones.
    """

    def cannot_be(parameter: Parameter) -> bool:
        is_empty = parameter.dim() == 0 or parameter.numel() == 0
        return is_empty or not (isinstance(parameter, DTensor) or can_be_sharded(parameter))

    return [parameter for parameter in module.parameters() if cannot_be(parameter)]


class ReplicatedParameter(Parameter):
    """A parameter that is not sharded, but whose `data` may be assigned a DTensor."""

    @property
    def data(self) -> Tensor:
        """Its values, without autograd."""
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        # A DTensor in an ordinary parameter ends the process at its next use (torch 2.13).
        _DATA.__set__(self, value.full_tensor().detach() if isinstance(value, DTensor) else value)


def watch_assignments(parameters: Iterable[Parameter]) -> Callable[[], None]:
    """Let DTensors be assigned to the `data` of `parameters`; return a function that ends this."""
    watched = [parameter for parameter in parameters if type(parameter) is Parameter]
    for parameter in watched:
        parameter.__class__ = ReplicatedParameter

    def end() -> None:
        for parameter in watched:
            parameter.__class__ = Parameter

    return end


class AveragedGradients:
    """Averages the gradients of replicated parameters over the data ranks at the end of each backward pass.

    One all-reduce per dtype. Accumulating steps average, too: averaging equal values again changes nothing.

    Args:
        parameters: replicated on the data ranks.
        group: of the data ranks; `None` is the world.
    """

    def __init__(self, parameters: list[Parameter], group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        self._parameters = parameters
        self._queued = False
        self._handles = [_on_gradient(parameter, self._gradient_came) for parameter in parameters]

    def remove(self) -> None:
        """Stop averaging."""
        for handle in self._handles:
            handle.remove()

    def _gradient_came(self, parameter: Tensor) -> None:
        if not self._queued:
            self._queued = True
            call_at_end_of_backward(self._average)

    def _average(self) -> None:
        self._queued = False
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for alike in group_by_dtype_and_device(gradients):
            flat = torch.cat([gradient.view(-1) for gradient in alike])
            dist.all_reduce(flat, group=self._group)
            flat.div_(dist.get_world_size(self._group))
            for gradient, averaged in zip(alike, torch.split(flat, [g.numel() for g in alike]), strict=True):
                gradient.copy_(averaged.view_as(gradient))


def _on_gradient(parameter: Parameter, hook: object) -> torch.utils.hooks.RemovableHandle:
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses the hook otherwise; the parameter may be unfrozen later
    handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)
    return handle


def share_on(device: torch.device, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the first rank's values of a unit's `tensors` on `device`, before the unit is sharded there.

    *Collective* over `group`; `None` is the world.

    This uses the network of the devices, and no more memory than FSDP2 needs for the unit in any case.
    """
    tensors = list(tensors)
    make_room_on(device, tensors, is_source=dist.get_rank(group) == 0)
    broadcast(tensors, group)


@torch.no_grad()
def make_room_on(device: torch.device, tensors: Iterable[Tensor], *, is_source: bool) -> None:
    """Move `tensors` to `device`; on ranks that will receive the values, only allocate memory there.

    If `device` is the host, parameters get new memory on these ranks, since `from_pretrained` leaves them in a private
    mapping of the file: pages written there stay in memory as long as the file is mapped, in the end the full model.
    """
    for tensor in tensors:
        if is_source:
            tensor.data = tensor.data.to(device)
        elif device.type != "cpu" or isinstance(tensor, Parameter):
            tensor.data = torch.empty_like(tensor.data, device=device)
