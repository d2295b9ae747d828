"""What calling a unit does on a stage: run it, receive what the stage before has computed, or leave the step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from lightning_paral.comm.channel import Channel, TensorSpec, with_tensors
from lightning_paral.compat.torch.autograd import is_in_transform
from lightning_paral.compat.torch.modules import subclass_of
from lightning_paral.compat.torch.tensors import tree_leaves, tree_map_only
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.division import End
from lightning_paral.engines.pipeline.schedule import generator_states
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.units import Unit

Call = Callable[..., Any]
_PLAIN = bool | int | float | str | None


class Pipeline:
    """The pipeline of this rank in one run, with a group for each kind of message, so that none waits for another.

    Creating it is *collective* over the pipeline.

    Args:
        dims: the arrangement of the ranks.
        device: the device of this rank.
        is_ring: whether the last stage also sends activations to the first one.
    """

    def __init__(self, dims: ParallelDims, device: torch.device, *, is_ring: bool) -> None:
        self.dims = dims
        self.device = device
        self.is_last = dims.stage == dims.pipeline - 1
        """Whether this rank has the last stage."""
        ways = ("", " around") if is_ring else ("",)
        self.activations = [dims.new_pipeline_group(f"activations{way}") for way in ways]
        """For those between neighbors and, if there is a ring, from the last stage to the first one."""
        self.gradients = [dims.new_pipeline_group(f"gradients of activations{way}") for way in ways]
        self.results = dims.new_pipeline_group("results of steps")
        self.values = dims.new_pipeline_group("values")
        """For collectives, such as broadcasts of parameters."""

    def destroy(self) -> None:
        """Destroy the groups, once everything is received. *Collective* over the pipeline."""
        for group in (*self.activations, *self.gradients, self.results, self.values):
            dist.destroy_process_group(group)


class Boundaries:
    """Connects the parts of a stage with the parts before and after them, which other stages have.

    Args:
        pipeline: the pipeline of this rank.
        parts: the numbers of the parts of this stage.
        num_parts: the number of parts of all stages.
    """

    def __init__(self, pipeline: Pipeline, parts: Sequence[int], num_parts: int) -> None:
        dims, device = pipeline.dims, pipeline.device
        self._activations: dict[int, Channel] = {}
        """By the number of the part that receives them."""
        self._gradients: dict[int, Channel] = {}
        """Those for activations, by the same number."""
        ends = [(part, part - 1) for part in parts if part > 0]
        ends += [(part + 1, part + 1) for part in parts if part + 1 < num_parts]
        for into, other in ends:
            peer, way = dims.pipeline_ranks[other % dims.pipeline], int(into % dims.pipeline == 0)
            self._activations[into] = Channel(pipeline.activations[way], peer, device, tag=into)
            self._gradients[into] = Channel(pipeline.gradients[way], peer, device, tag=into)
        self.is_in_backward = False
        """Set it during the backward passes of a step, in which alone gradients are sent."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """What is received requires a gradient, so it depends on this."""

    def expect(self, num_micro_batches: int) -> None:
        """Prepare a training step, whose forward and backward passes send a message for each micro-batch.

        *Collective* over the pipeline.
        """
        for channel in (*self._activations.values(), *self._gradients.values()):
            channel.expect(num_micro_batches)

    def receive(self, part: int) -> "Received":
        """Return the output of the last unit before `part`, a part of this stage."""
        return Received(self, self._gradients[part], *self._activations[part].receive())

    def send(self, output: Any, part: int, unit: str) -> Tensor:
        """Send `output`, and return a zero whose backward pass waits for the gradients of what was sent.

        Args:
            output: the output of the last unit of `part`.
            part: the number of a part of this stage.
            unit: the name of the unit, for error messages.

        Raises:
            ConfigurationError: `output` has values that cannot be sent.
        """
        if not torch.is_grad_enabled():
            output = tree_map_only(Tensor, Tensor.detach, output)
        leaves = tree_leaves(output)
        unknown = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | _PLAIN)]
        if unknown:
            raise ConfigurationError(
                f"{unit} returns a {unknown[0]}, which cannot be sent to the next stage of the pipeline. Return "
                "tensors, or tuples, lists or dicts of tensors and plain numbers."
            )
        self._activations[part + 1].send(output)
        trained = [leaf for leaf in leaves if _requires_grad(leaf)]
        if not trained:
            return torch.zeros((), device=self.anchor.device)
        zero: Tensor = _Send.apply(self._gradients[part + 1], *trained)  # type: ignore[no-untyped-call]
        return zero

    def finish(self) -> None:
        """Wait until everything is sent."""
        for channel in (*self._activations.values(), *self._gradients.values()):
            channel.finish()
        self.expect(0)


class Received:
    """What a stage has received in a pass. The stage before awaits the gradients of tensors that require them."""

    def __init__(self, boundaries: Boundaries, channel: Channel, values: Any, tensors: list[Tensor]) -> None:
        self._boundaries = boundaries
        self._channel = channel
        self._values = values
        self._tensors = tensors
        specs = [leaf for leaf in tree_leaves(values) if isinstance(leaf, TensorSpec)]
        self.awaited = {number: spec for number, spec in enumerate(specs) if spec.requires_grad}
        """The tensors whose gradients the stage before awaits."""

    def as_nan(self) -> Any:
        """Return NaN in place of the values, which code between units may write to."""
        nan = self._boundaries.anchor * float("nan")
        return with_tensors(self._values, [_nan_of(each, nan) for each in self._tensors])

    def in_graph(self, given: Sequence[Tensor]) -> Any:
        """Return the values. Gradients by `given`, which would pass through units of an earlier stage, are refused."""
        tensors, self._tensors = self._tensors, []
        if self.awaited:
            with torch.enable_grad():  # also if the code around this unit computes no gradients
                tensors = _Receive.apply(self._boundaries.anchor, self, tensors, *given)  # type: ignore[no-untyped-call]
        return with_tensors(self._values, tensors)

    def answer(self, gradients: Sequence[Tensor] = ()) -> None:
        """Send `gradients` to the stage before, or zeros after a backward pass that did not reach the tensors.

        Raises:
            ConfigurationError: the code of the user computes them, inside a step.
        """
        if not self._boundaries.is_in_backward:
            raise ConfigurationError(
                "The code of a step computes gradients itself, such as by torch.autograd.grad or backward(), which may "
                "have to pass through units of an earlier stage. In a pipeline, a step can compute gradients by what "
                "the last unit returns, and by weights that are used after it only. For others, train with paral_ddp, "
                "or with paral_fsdp if they are not differentiated again."
            )
        device = self._boundaries.anchor.device
        self._channel.send_tensors(gradients or [spec.empty(device).zero_() for spec in self.awaited.values()])
        self.awaited = {}


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Received, tensors: list[Tensor], *given: Tensor) -> Any:
        ctx.received, ctx.num_given = received, len(given)
        ctx.mark_non_differentiable(*(each for number, each in enumerate(tensors) if number not in received.awaited))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.received.answer([gradients[number] for number in ctx.received.awaited])
        return (None,) * (3 + ctx.num_given)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, *tensors: Tensor) -> Tensor:
        ctx.gradients = channel.post_tensors([TensorSpec.of(tensor) for tensor in tensors])
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gradients()


# Calls of modules


class StageDone(BaseException):
    """Leaves a step of the user after the last unit of a stage.

    It is no `Exception`, so that user code that catches exceptions lets it pass.
    """

    def __init__(self, sent: Tensor) -> None:
        super().__init__()
        self.sent = sent


class UnitCalls:
    """Replaces the calls of all units of the chain, and of modules at its ends, during a run.

    Units must be called once each, in order. On a stage, the call of the last unit of the stage before returns what was
    received, and those of earlier units NaN of the same shape. So the loss is NaN if a step uses them. The call of the
    last unit of a stage sends its output and raises `StageDone`, except on the last stage. If a stage has several parts
    of the chain, a pass runs the units of one of them, and the stage before is what comes before this part.

    The code before the chain runs on all stages, but only the first unit may use what modules of `first_stage` return.
    On later stages, these return NaN as well: they run with NaN parameters that take no memory.

    Args:
        units: the units of the chain, in the order in which they are called.
        parts: the positions of the units of each part of this stage, by the number of the part.
        boundaries: connects this stage with its neighbors.
        on_first: called when the first unit of the chain is called.
        in_full: returns what a unit returns, with ordinary tensors in place of those that are split over tensor ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parts: dict[int, range],
        boundaries: Boundaries,
        on_first: Callable[[], None],
        in_full: Callable[[Any], Any],
    ) -> None:
        self._units = units
        self._parts = parts
        self._part, self._own = 0, range(0)
        self._boundaries = boundaries
        self._on_first = on_first
        self._in_full = in_full
        self.received: Received | None = None
        """What the last pass has received, whose gradients the stage before awaits."""
        self._stand_in: Any = None
        self._given: list[Tensor] = []
        """What earlier units of a pass that is checked were called with."""
        self._has_grad = self._is_on_nan = False
        self.is_checked = False
        """Whether passes note what units return, and draws, and refuse gradients through earlier stages."""
        self._drawn_from = b""
        self.has_drawn = False
        """Whether passes that were checked have drawn random numbers after the first unit was called."""
        self.hides_insides = False
        """Whether passes run all units with NaN as well, so that what they keep, or give to hooks, is NaN."""
        self._next_unit: int | None = None
        """The position of the unit that is called next; `None` outside of a forward pass."""
        self.first_nan: tuple[int, str] | None = None
        """The first unit that has returned NaN in passes that were checked: its position and name."""

    def install(self, lacking: Sequence[End], undo: ExitStack) -> None:
        """Replace the calls of the units, and of the ends that this stage is `lacking`, until `undo` is closed."""
        for number, unit in enumerate(self._units):
            _replace_call(unit.module, partial(self._call, number), undo)
        for end in lacking:
            _replace_call(end.module, partial(self._call_end, end), undo)

    @contextmanager
    def forward_pass(self, step: str, part: int) -> Iterator[None]:
        """Allow one call of each unit inside the block, which runs the units of `part`.

        Raises:
            ConfigurationError: the block ended without calling all of them, or failed where it has NaN.
        """
        self._next_unit, self.received = 0, None
        self._part, self._own = part, self._parts[part]
        self._has_grad = torch.is_grad_enabled()
        try:
            yield
            if self._next_unit < len(self._units):
                raise ConfigurationError(
                    f"{step} ended without calling {self._name(self._next_unit)}. {self._in_order()}"
                )
        except Exception as error:
            if isinstance(error, ParalError) or not 0 < self._next_unit < self._own.start:
                raise
            raise ConfigurationError(
                f"The step failed between {self._name(self._next_unit - 1)} and {self._name(self._next_unit)}, which "
                f"are on an earlier stage, with NaN in the shape of what {self._name(self._own.start - 1)} returns: "
                f"{type(error).__name__}: {error}. Move the code between them into a unit, choose units=[...] of which "
                "each is called with what the one before returns, or train with paral_fsdp."
            ) from error
        finally:
            if self.is_checked and self._next_unit:
                self.has_drawn |= self._drawn_from != generator_states()
            self._next_unit = self._stand_in = None
            self._given.clear()

    def _call(self, number: int, run: Call, args: Any, kwargs: Any) -> Any:
        """Do what calling unit `number` does on this stage; `run` runs the unit."""
        if self._boundaries.is_in_backward or self._is_on_nan:  # activation checkpointing calls it again
            return run(*args, **kwargs)
        self._check_call(number)
        if number == 0:
            self._on_first()
            self._drawn_from = generator_states() if self.is_checked else b""
            if self._own.start > 0:
                self.received = self._boundaries.receive(self._part)
                self._stand_in = self.received.as_nan() if self._own.start > 1 else None
        self._next_unit = number + 1
        is_own = number in self._own
        if is_own:
            output = self._in_full(run(*args, **kwargs))
            if self.is_checked and self.first_nan is None:
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                if any(bool(tensor.isnan().any()) for tensor in tensors):
                    self.first_nan = number, self._name(number)
        else:
            assert self.received is not None
            if self.is_checked:
                self._given += filter(_requires_grad, tree_leaves((args, kwargs)))
            output = self.received.in_graph(self._given) if number == self._own.start - 1 else self._stand_in
        if self.hides_insides:
            with suppress(Exception), self._on_nan():  # it may fail on NaN
                hide = partial(tree_map_only, Tensor, partial(_nan_of, nan=self._boundaries.anchor * float("nan")))
                if is_own:
                    args, kwargs = hide((args, kwargs))
                    run(*args, **kwargs)
                else:  # lists and dicts stay the same: a unit may add to those it is given
                    args = [hide(each) if isinstance(each, Tensor) else each for each in args]
                    kwargs = {key: hide(each) if isinstance(each, Tensor) else each for key, each in kwargs.items()}
                    _with_nan_parameters(self._units[number].module, args, kwargs)
        if number == self._own.stop - 1 and number < len(self._units) - 1:
            raise StageDone(self._boundaries.send(output, self._part, self._name(number)))
        return output

    def _call_end(self, end: End, run: Call, args: Any, kwargs: Any) -> Any:
        if self._is_on_nan:
            return run(*args, **kwargs)
        if self._next_unit != 0 or end.stage != 0:
            raise ConfigurationError(
                f"{end.name} was called on a stage that does not have it: {end.option} keeps it on one stage only. "
                "Modules of first_stage can be called before the first unit, modules of last_stage after the last "
                f"one, both in steps only. Leave {end.name!r} out of {end.option}, so that all stages have it."
            )
        with self._on_nan():
            return _with_nan_parameters(end.module, args, kwargs)

    @contextmanager
    def _on_nan(self) -> Iterator[None]:
        """Run the modules that are called inside the block as they are, without gradients."""
        self._is_on_nan = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_on_nan = False

    def _check_call(self, number: int) -> None:
        problem, parameters = "", self._units[number].module.parameters()
        if self._next_unit is None:
            problem = (
                "was called outside of a training, validation, test or predict step. Under paral_pp it is on one stage "
                "only, and stages run their units in steps only. Move the call into a step, or train with paral_fsdp."
            )
        elif number != self._next_unit:
            before = f"after {self._name(self._next_unit - 1)}" if self._next_unit else "first"
            problem = f"was called {before}. {self._in_order()} Choose other units=[...], or train with paral_fsdp."
        elif self._has_grad and not torch.is_grad_enabled() and any(map(_requires_grad, parameters)):
            problem = (
                "has trained parameters, but was called without gradients, so none could be sent between stages. Under "
                "torch.no_grad(), freeze the parameters: requires_grad_(False). Instead of a reentrant "
                "torch.utils.checkpoint, use ParalPipelineStrategy(activation_checkpointing=...)."
            )
        elif is_in_transform():
            problem = (
                "was called inside a transform of torch.func, or with forward-mode AD, which cannot pass through the "
                "stages of a pipeline. Train with paral_ddp."
            )
        if problem:
            raise ConfigurationError(f"{self._name(number)} {problem}")

    def _in_order(self) -> str:
        first, last = self._name(0), self._name(len(self._units) - 1)
        return f"In a pipeline, every step must call each of the units {first} ... {last} once, in this order."

    def _name(self, number: int) -> str:
        return self._units[number].name


def _replace_call(module: Module, call: Callable[[Call, Any, Any], Any], undo: ExitStack) -> None:
    """Make `module(*args, **kwargs)` return `call(run, args, kwargs)` until `undo` is closed; `run` runs the module."""

    class OfStage:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(super().__call__, args, kwargs)  # type: ignore[misc]

    original = type(module)
    module.__class__ = subclass_of(original, OfStage, {})
    undo.callback(setattr, module, "__class__", original)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _nan_of(tensor: Tensor, nan: Tensor) -> Tensor:
    """Return NaN of the shape of `tensor`, a copy of it if it has integers."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.clone() if is_integer else tensor + nan.to(tensor.dtype)


def _with_nan_parameters(module: Module, args: Any, kwargs: Any) -> Any:
    """Return what `module` returns with NaN in place of its parameters, which take no memory. Its buffers stay."""
    nan = {
        name: torch.full((), float("nan"), dtype=each.dtype, device=each.device).expand(each.shape)
        for name, each in module.named_parameters()
    }
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    return functional_call(module, nan | buffers, tuple(args), kwargs)
