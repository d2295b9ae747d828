"""Mark in a trace where the passes of units begin and end, and when gradients are ready."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.model.units import choose_units
from lightning_paral.planning.memory_trace import MemoryTrace
from lightning_paral.planning.timeline import Kind, PlannedUnit


def planned_units(module: LightningModule) -> tuple[PlannedUnit, ...]:
    """Return the units that FSDP chooses by default, the root last."""
    units = choose_units(module, children=not module.automatic_optimization)
    numbers = {parameter: number for number, parameter in enumerate(module.parameters())}
    return tuple(
        PlannedUnit(name=unit.name, parameters=tuple(numbers[parameter] for parameter in unit.parameters))
        for unit in (*units.inner, units.root)
    )


def mark_units(
    module: LightningModule, units: Sequence[PlannedUnit], optimizers: Sequence[Optimizer], trace: MemoryTrace
) -> list[Any]:
    """Mark the passes of the units, the gradients that are ready, and the steps of the optimizers; return the hooks."""
    hooks: list[Any] = []
    modules = dict(module.named_modules())
    for index, unit in enumerate(units[:-1]):
        hooks += _mark_unit(modules[unit.name], index, trace)
    for index, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:
            mark = _marking_gradient(trace, index)
            hooks.append(parameter.register_post_accumulate_grad_hook(mark))  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        hooks.append(optimizer.register_step_pre_hook(lambda *_: trace.enter_optimizer()))
        hooks.append(optimizer.register_step_post_hook(lambda *_: trace.leave_optimizer()))
    return hooks


def _mark_unit(module: Module, index: int, trace: MemoryTrace) -> list[Any]:
    """Mark when the forward and backward pass of a unit begin and end."""

    def enter(*_: Any) -> None:
        trace.mark(Kind.ENTER_FORWARD, index)

    def leave(_module: Module, _args: Any, output: Any) -> None:
        trace.mark(Kind.LEAVE_FORWARD, index)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: trace.mark(Kind.ENTER_BACKWARD, index))  # type: ignore[no-untyped-call]

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _marking_gradient(trace: MemoryTrace, index: int) -> Any:
    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            trace.become_gradient(parameter.grad, index)

    return mark


def tensors_in(data: Any) -> list[Tensor]:
    """Return all tensors in nested collections."""
    found: list[Tensor] = []
    apply_to_collection(data, Tensor, found.append)
    return found
