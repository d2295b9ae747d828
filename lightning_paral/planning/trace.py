"""Count the model states, and follow one training step on tensors without memory: what exists at once, by unit."""

import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.torch.tensors import TorchDispatchMode, identity_of, is_value_missing, tree_leaves
from lightning_paral.model.activation_checkpointing import checkpoint_units
from lightning_paral.model.units import choose_units
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.fake import FakeModule, call_step

Kind = Literal["activation", "cast", "gradient", "temporary", "given"]
"""What memory is for. `cast`: a copy of a parameter that autocast keeps; `temporary`: memory of `optimizer.step`;
`given`: it existed before the step."""
_MISSING_VALUE = "The module reads values of tensors, for example with .item(). They were taken as 1."
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
ROOT = -1
"""The unit of what runs outside of all others."""


@dataclass(frozen=True)
class ParameterState:
    """The states of one parameter, unsharded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    """Whether it requires a gradient."""
    optimizer_bytes: int = 0
    """Bytes of all optimizer states, also of scalars such as `step`."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the parameter in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """The size of the gradient in bytes; 0 if the parameter is frozen."""
        return self.num_bytes * self.is_trained


class ModelStates:
    """The states of a module, unsharded. Tied parameters count once. Sizes are in bytes.

    Args:
        parameters: the states of each parameter.
        buffer_bytes: of the buffers.
        num_optimizers: the number of optimizers.
        early_bytes: of the parameters that are built before `configure_model`, so that every rank builds all of them.
    """

    def __init__(
        self, parameters: Sequence[ParameterState], buffer_bytes: int = 0, num_optimizers: int = 1, early_bytes: int = 0
    ) -> None:
        self.parameters, self.buffer_bytes = tuple(parameters), buffer_bytes
        self.num_optimizers, self.early_bytes = num_optimizers, early_bytes
        self.num_params = sum(each.numel for each in parameters)
        self.num_trained = sum(each.numel for each in parameters if each.is_trained)
        self.parameter_bytes = sum(each.num_bytes for each in parameters)
        self.gradient_bytes = sum(each.gradient_bytes for each in parameters)
        self.optimizer_bytes = sum(each.optimizer_bytes for each in parameters)
        self.largest_gradient_bytes = max((each.gradient_bytes for each in parameters), default=0)


def count_states(fake: FakeModule, *, assume_adam: bool = False) -> ModelStates:
    """Count the states of a module.

    Args:
        fake: the module. If its optimizers have taken a step, their states exist, and are counted as they are.
        assume_adam: count two optimizer states per element of each trained parameter instead.
    """
    module = fake.module
    sizes = {
        parameter: sum(tensor.nbytes for tensor in tensors_in(state))
        for optimizer in fake.optimizers
        for parameter, state in optimizer.state.items()
    }
    if assume_adam:
        sizes = {parameter: 2 * parameter.nbytes for parameter in module.parameters() if parameter.requires_grad}
    parameters = [
        ParameterState(tuple(each.shape), each.dtype, each.requires_grad, sizes.get(each, 0))
        for each in module.parameters()
    ]
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    return ModelStates(parameters, buffer_bytes, max(1, len(fake.optimizers)), fake.early_bytes)


def tensors_in(data: object) -> list[Tensor]:
    """Return the tensors of a collection."""
    found: list[Tensor] = []
    apply_to_collection(data, Tensor, found.append)
    return found


class Point(NamedTuple):
    """The moment with the most memory in a part of a step. Sizes are bytes of unsharded tensors."""

    unit: int
    """The unit that runs; `ROOT` for the root."""
    in_backward: bool
    activations: int
    casts: int
    gradients: int
    """Of all parameters. In a forward pass, those of the step before."""
    reduces: bool = True
    """Whether the gradients of the unit may be reduced here. They are not yet where activations need the most."""

    @property
    def used(self) -> int:
        """Activations and casts."""
        return self.activations + self.casts


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Parameters that FSDP and ZeRO-3 gather together."""

    name: str
    """The dotted name; empty for the root."""
    parameters: tuple[int, ...]
    """Numbers of the parameters, in the order of the module."""
    output_bytes: int = 0
    """What its forward pass returns."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of one process in Lightning's order: forward, `zero_grad`, backward, `optimizer.step`.

    The step is one after others, so optimizer states and the gradients of the step before exist when it begins.
    """

    points: tuple[Point, ...]
    """In order, without the optimizer."""
    units: tuple[PlannedUnit, ...]
    """In the order of the module; the root is the last one."""
    temporary_bytes: int = 0
    """The most that `optimizer.step` allocates at once."""
    batch_bytes: int = 0
    notes: tuple[str, ...] = ()
    """What was assumed."""


def planned_units(module: LightningModule) -> tuple[PlannedUnit, ...]:
    """Return the units that FSDP chooses by default, the root last."""
    units = choose_units(module, children=not module.automatic_optimization)
    numbers = {parameter: number for number, parameter in enumerate(module.parameters())}
    named = [(unit.name, tuple(numbers[each] for each in unit.parameters)) for unit in (*units.inner, units.root)]
    return tuple(PlannedUnit(name=name, parameters=parameters) for name, parameters in named)


def step_of_states(fake: FakeModule, states: ModelStates, reason: str) -> Step:
    """Return a step without activations, in which each unit computes its gradients while all others exist.

    Args:
        fake: the module.
        states: its states.
        reason: a note why its step is not followed.
    """
    units = planned_units(fake.module)
    points = tuple(Point(unit, True, 0, 0, states.gradient_bytes) for unit in (*range(len(units) - 1), ROOT))
    return Step(points=points, units=units, temporary_bytes=2 * states.largest_gradient_bytes, notes=(reason,))


def follow_step(
    fake: FakeModule, batch: Any, checkpointing: ActivationCheckpointing | None = None, *, on_cpu: bool = False
) -> Step:
    """Return what a step on a batch of the shapes of `batch` allocates.

    Args:
        fake: the module, with its optimizers. Their states exist afterwards.
        batch: what the training loader yields, with real or fake tensors.
        checkpointing: the units whose activations are recomputed in the backward pass.
        on_cpu: whether to count the copies in another layout that oneDNN makes of what a convolution reads and writes.

    Raises:
        Exception: whatever the module raises, for example because it needs values of tensors.
    """
    planned, optimizers = planned_units(fake.module), fake.optimizers
    trace = _Trace(on_cpu)
    with ExitStack() as stack:
        if checkpointing is not None:
            stack.callback(checkpoint_units(fake.module, checkpointing))
        stack.enter_context(fake.mode)
        batch = fake.converted(batch)
        trace.give([*fake.module.buffers(), *tensors_in(batch)])
        trace.give(fake.module.parameters(), are_parameters=True)
        output_bytes = _mark(fake, planned, trace, stack)
        stack.enter_context(trace)
        # Optimizer states and gradients exist when a step begins, from the one before.
        if not any(optimizer.state for optimizer in optimizers):
            _take_step(fake, batch, trace)
        for parameter in fake.module.parameters():
            if parameter.grad is not None:
                trace.become(parameter.grad, "gradient")
        trace.give(tensors_in([list(optimizer.state.values()) for optimizer in optimizers]))
        trace.restart()
        _take_step(fake, batch, trace)
    return Step(
        points=tuple(trace.points),
        units=tuple(replace(unit, output_bytes=size) for unit, size in zip(planned, output_bytes, strict=True)),
        temporary_bytes=trace.temporary_bytes,
        batch_bytes=sum(tensor.nbytes for tensor in tensors_in(batch)),
        notes=tuple(sorted(trace.notes)),
    )


def _take_step(fake: FakeModule, batch: Any, trace: "_Trace") -> None:
    """Run a step in Lightning's order. With accumulation, two micro-batches stand for all of them."""
    module, accumulate = fake.module, fake.settings.accumulate

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        trace.enter(ROOT, in_backward=True)
        torch.autograd.backward(loss, *args, **kwargs)
        trace.enter(ROOT, in_backward=False)

    fake.use_optimizers(backward)
    for number in range(min(2, accumulate)):
        trace.enter(ROOT, in_backward=False)
        with fake.trainer.precision_plugin.forward_context():
            output: Any = call_step(module.training_step, batch)
        loss: Any = output.get("loss") if isinstance(output, dict) else output
        del output
        if module.automatic_optimization:
            for optimizer in fake.optimizers if number == 0 else ():
                optimizer.zero_grad()
            backward(loss / accumulate if accumulate > 1 else loss)
        del loss
    for optimizer in fake.optimizers if module.automatic_optimization else ():
        optimizer.step()


def _mark(fake: FakeModule, units: Sequence[PlannedUnit], trace: "_Trace", undo: ExitStack) -> list[int]:
    """Mark where passes of units begin, when gradients are ready, and steps of optimizers, until `undo` is closed.

    Returns:
        The bytes of what each unit returns, which are known after a step.
    """
    hooks, output_bytes = list[Any](), [0] * len(units)

    def ready(parameter: Tensor) -> None:
        if parameter.grad is not None:
            trace.become(parameter.grad, "gradient")

    def enter(index: int, *_: Any) -> None:
        if not trace.in_backward:  # it is not a recomputation
            trace.enter(index, in_backward=False)

    def leave(index: int, _module: Module, _args: Any, output: Any) -> None:
        tensors = tensors_in(output)
        if not trace.in_backward:
            output_bytes[index] = sum(tensor.nbytes for tensor in tensors)
            trace.enter(ROOT, in_backward=False)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: trace.enter(index, in_backward=True))  # type: ignore[no-untyped-call]

    for index, unit in enumerate(units[:-1]):
        part = fake.module.get_submodule(unit.name)
        hooks.append(part.register_forward_pre_hook(partial(enter, index)))
        hooks.append(part.register_forward_hook(partial(leave, index)))
    for parameter in fake.module.parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(ready))  # type: ignore[no-untyped-call]
    for optimizer in fake.optimizers:
        hooks.append(optimizer.register_step_pre_hook(lambda *_: trace.enter_optimizer()))
        hooks.append(optimizer.register_step_post_hook(lambda *_: trace.leave_optimizer()))
    for hook in hooks:
        undo.callback(hook.remove)
    return output_bytes


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the memory of tensors that operations create, until it is freed.

    Use it inside a fake tensor mode, which is entered first. Memory that an operation uses internally is not seen.
    """

    def __init__(self, on_cpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: set[str] = set()
        self.in_backward = False
        self._on_cpu, self._unit = on_cpu, ROOT
        self._kind: Kind = "activation"
        self._now: dict[Kind, int] = dict.fromkeys(("activation", "cast", "gradient", "temporary", "given"), 0)
        # By the identity of a storage. It is removed when the storage is freed.
        self._living: dict[int, tuple[Kind, int]] = {}
        self._parameters: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Forget the points so far."""
        self.points: list[Point] = []
        self.temporary_bytes = 0
        self._most = self._most_used = self._point()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if func is not torch.ops.aten._local_scalar_dense.default or not is_value_missing(error):
                raise
            self.notes.add(_MISSING_VALUE)
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
                self._see(leaf, self._kind)
        if self._on_cpu and func in _CONVOLUTIONS:
            sizes = sorted(leaf.nbytes for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor))
            self._add(self._kind, sum(sizes[-2:]))
            self._now[self._kind] -= sum(sizes[-2:])
        if func is torch.ops.aten._to_copy.default and identity_of(args[0].untyped_storage()) in self._parameters:
            self.become(out, "cast")
        return out

    def give(self, tensors: Iterable[Tensor], *, are_parameters: bool = False) -> None:
        """Do not count the memory of tensors that exist before the step; recognize copies of parameters."""
        for tensor in tensors:
            self.become(tensor, "given")
            if are_parameters:
                self._parameters.add(identity_of(tensor.untyped_storage()))

    def become(self, tensor: Tensor, kind: Kind) -> None:
        """Count the memory of `tensor` as another kind from now on."""
        self._see(tensor, kind)
        address = identity_of(tensor.untyped_storage())
        old, size = self._living[address]
        self._living[address] = kind, size
        self._now[old] -= size
        self._add(kind, size)

    def enter(self, unit: int, *, in_backward: bool) -> None:
        """Count what follows with a unit."""
        # Two, because which of them is the peak depends on the engine, and on the size of the batch.
        self.points += (self._most, self._most_used._replace(reduces=False))
        self._unit, self.in_backward = unit, in_backward
        self._most = self._most_used = self._point()

    def enter_optimizer(self) -> None:
        """Count what follows as memory of the optimizer."""
        self.enter(ROOT, in_backward=False)
        self._kind = "temporary"

    def leave_optimizer(self) -> None:
        """Count what follows as activations."""
        self._kind = "activation"

    def _point(self) -> Point:
        now = self._now
        return Point(self._unit, self.in_backward, now["activation"], now["cast"], now["gradient"])

    def _add(self, kind: Kind, size: int) -> None:
        self._now[kind] += size
        self.temporary_bytes = max(self.temporary_bytes, self._now["temporary"])
        point = self._point()
        self._most = max(self._most, point, key=lambda each: each.used + each.gradients)
        self._most_used = max(self._most_used, point, key=lambda each: each.used)

    def _see(self, tensor: Tensor, kind: Kind) -> None:
        storage = tensor.untyped_storage()
        address = identity_of(storage)
        if address not in self._living:
            self._living[address] = kind, storage.nbytes()
            self._add(kind, storage.nbytes())
            # The Python object of a storage lives as long as its memory, even while only C++ holds it.
            weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        kind, size = self._living.pop(address)
        self._now[kind] -= size
