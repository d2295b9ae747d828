"""Copy tensors to several devices; in the backward pass the gradients of the copies are summed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import comm


def broadcast(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], before_backward: Callable[[], None]
) -> list[list[Tensor]]:
    """Return copies of `tensors` on each of `devices`, one list per device.

    Gradients of the copies are added in the order of `devices`, regardless of the order in which they are computed, so
    that results are reproducible. A tensor gets no gradient if none of its copies has one.

    Args:
        tensors: usually parameters; all on one device.
        devices: devices of the copies; a device may occur more than once.
        before_backward: called before gradients flow back to `tensors`; raises an error if they must not.
    """
    if not tensors:
        return [[] for _ in devices]
    copies = _Broadcast.apply(before_backward, tuple(devices), *tensors)  # type: ignore[no-untyped-call]
    return [list(copies[start : start + len(tensors)]) for start in range(0, len(copies), len(tensors))]


def copy_to(devices: Sequence[torch.device], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return copies of `tensors` on each of `devices`, detached from the graph."""
    plain = [tensor.detach() for tensor in tensors]
    if plain and _can_coalesce(plain, devices):
        source = plain[0].device
        coalesced = comm.broadcast_coalesced(plain, [source, *devices])  # type: ignore[no-untyped-call]
        return [list(copies) for copies in coalesced[1:]]
    return [[tensor.to(device, non_blocking=True, copy=True) for tensor in plain] for device in devices]


def _can_coalesce(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> bool:
    source = tensors[0].device
    return (
        len({source, *devices}) == len(devices) + 1
        and all(device.type == "cuda" for device in (source, *devices))
        and all(tensor.device == source and not tensor.is_complex() and not tensor.is_sparse for tensor in tensors)
    )


class _Broadcast(Function):
    @staticmethod
    def forward(
        ctx: Any, before_backward: Callable[[], None], devices: tuple[torch.device, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.before_backward = before_backward
        ctx.source_devices = [tensor.device for tensor in tensors]
        copies = copy_to(devices, tensors)
        without_gradient = [index for index, needed in enumerate(ctx.needs_input_grad[2:]) if not needed]
        ctx.mark_non_differentiable(*(on_device[index] for on_device in copies for index in without_gradient))
        return tuple(copy for on_device in copies for copy in on_device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.before_backward()
        num_tensors = len(ctx.source_devices)
        return (
            None,
            None,
            *(_add(gradients[index::num_tensors], device) for index, device in enumerate(ctx.source_devices)),
        )


def _add(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            moved = gradient.to(device, non_blocking=True)
            total = moved if total is None else total + moved
    return total
