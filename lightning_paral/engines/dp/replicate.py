"""Copy a module to the other devices for one step; in the backward pass the gradients of the copies are summed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module
from torch.nn.parallel import comm

from lightning_paral.compat.lightning.strategies import set_device
from lightning_paral.compat.torch.modules import copy_without_values, own_buffers, own_children, own_parameters
from lightning_paral.engines.dp.metrics import MetricCopies, is_metric
from lightning_paral.errors import ConfigurationError


class Replicas:
    """Copies of `master` for one step.

    As with `torch.nn.parallel.replicate`, a copy has its own parameters and buffers, and shares all other attributes by
    reference; attributes assigned to it are lost after the step. Unlike with `replicate`, `parameters()` of a copy
    yields its parameters, methods stored as attributes are bound to the copy, and metrics are copied by `MetricCopies`.

    Args:
        master: the module; all its parameters are on one device.
        devices: devices of the copies.
        metrics: the metrics of each copy.
        before_backward: called before gradients flow back into the master; raises an error if they must not.
    """

    def __init__(
        self,
        master: Module,
        devices: Sequence[torch.device],
        metrics: Sequence[MetricCopies],
        before_backward: Callable[[], None],
    ) -> None:
        originals = list(_modules(master))
        parameters, buffers = (_by_id(map(own, originals)) for own in (own_parameters, own_buffers))
        tensors = parameters | buffers
        on_devices = _broadcast(list(tensors.values()), devices, before_backward)
        self.modules: list[Any] = []
        for device, metric_copies, values in zip(devices, metrics, on_devices, strict=True):
            copies = _copy_structure(originals, device, metric_copies)
            _set_tensors(originals, copies, dict(zip(tensors, values, strict=True)))
            self.modules.append(copies[id(master)])
        self._masters = list(parameters.values())
        self._memory = [parameter.data_ptr() for parameter in self._masters]
        self._copies = [values[: len(parameters)] for values in on_devices]
        self._frozen = [copy for copies in self._copies for copy in copies if not copy.requires_grad]

    def copy_values(self) -> None:
        """Copy the master's current values into the copies' parameters, for the backward pass of the last step.

        Skip parameters of the master that have since been given new memory: the graph of the step uses the old memory,
        whose values the copies have.
        """
        for tensors in self._copies:
            for master, copy, memory in zip(self._masters, tensors, self._memory, strict=True):
                if master.data_ptr() == memory:
                    copy.data.copy_(master.data)

    def check_frozen(self) -> None:
        """Check that the step unfroze no parameter of a copy, whose gradient would be lost with the copy.

        Raises:
            ConfigurationError: the step unfroze a parameter.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ConfigurationError(
                "A step unfroze a parameter. Under paral_dp a step runs in replicas, whose parameters are copies. "
                "Unfreeze in a hook such as on_train_batch_start, or use paral_ddp."
            )


def _modules(module: Module, seen: set[int] | None = None) -> Iterator[Module]:
    """Yield `module` and its submodules, each once, without metrics."""
    seen = set() if seen is None else seen
    if id(module) in seen or is_metric(module):
        return
    seen.add(id(module))
    yield module
    for child in own_children(module).values():
        if child is not None:
            yield from _modules(child, seen)


def _by_id(tensors_of_modules: Iterable[Mapping[str, Tensor | None]]) -> dict[int, Tensor]:
    return {id(tensor): tensor for own in tensors_of_modules for tensor in own.values() if tensor is not None}


def _copy_structure(originals: Sequence[Module], device: torch.device, metrics: MetricCopies) -> dict[int, Module]:
    """Return copies of `originals` without parameters and buffers, by the `id` of the original."""
    copies = {id(original): copy_without_values(original) for original in originals}
    for original in originals:
        copy = copies[id(original)]
        for name, child in own_children(original).items():
            if child is not None:
                own_children(copy)[name] = metrics.copy_of(child) if is_metric(child) else copies[id(child)]
        for name, value in list(copy.__dict__.items()):
            if type(value) is MethodType and id(value.__self__) in copies:
                copy.__dict__[name] = MethodType(value.__func__, copies[id(value.__self__)])
        set_device(copy, device)
    return copies


def _set_tensors(originals: Sequence[Module], copies: dict[int, Module], values: dict[int, Tensor]) -> None:
    """Set the parameters and buffers of `copies` to `values`, by the `id` of the original module and tensor."""
    for original in originals:
        copy = copies[id(original)]
        own: dict[str, Any] = own_parameters(copy)
        own.clear()
        for name, parameter in own_parameters(original).items():
            value = None if parameter is None else values[id(parameter)]
            # `setattr`, because recurrent layers keep a list of the weights that are assigned to them.
            setattr(copy, name, value)
            # An attribute of this name would hide the tensor that `torch.func.functional_call` swaps in.
            vars(copy).pop(name, None)
            own[name] = value
        own_buffers(copy).update(
            {name: values[id(buffer)] for name, buffer in own_buffers(original).items() if buffer is not None}
        )


def _broadcast(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], before_backward: Callable[[], None]
) -> list[list[Tensor]]:
    """Return copies of `tensors` on each of `devices`, one list per device.

    Gradients of the copies are added in the order of `devices`, regardless of the order in which they are computed, so
    that results are reproducible. A tensor gets no gradient if none of its copies has one.
    """
    if not tensors:
        return [[] for _ in devices]
    copies = _Broadcast.apply(before_backward, tuple(devices), *tensors)  # type: ignore[no-untyped-call]
    return [list(copies[start : start + len(tensors)]) for start in range(0, len(copies), len(tensors))]


def _copy_to(devices: Sequence[torch.device], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
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
        copies = _copy_to(devices, tensors)
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
