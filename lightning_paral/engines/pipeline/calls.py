"""What calling a unit does on a stage: run it, receive what the stage before has computed, or leave the step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from lightning_paral.compat.torch.autograd import is_in_transform, sequence_number, version_of
from lightning_paral.compat.torch.modules import subclass_of
from lightning_paral.compat.torch.tensors import tree_leaves, tree_map_only
from lightning_paral.engines.pipeline.boundaries import THROUGH_STAGES, Boundaries
from lightning_paral.engines.pipeline.division import End
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.units import Unit

Call = Callable[..., Any]


class StageDone(BaseException):
    """Leaves a step of the user after the last unit of a stage.

    It is no `Exception`, so that user code that catches exceptions lets it pass.
    """

    def __init__(self, sent: Tensor) -> None:
        super().__init__()
        self.sent = sent


class UnitCalls:
    """Replaces the calls of all units of the chain during a run.

    Units must be called once each, in order. On a stage, the call of the last unit of the stage before returns what was
    received, and those of earlier units NaN of the same shape. So the loss is NaN if a step uses them. The call of the
    last unit of a stage sends its output and raises `StageDone`, except on the last stage. If a stage has several parts
    of the chain, a pass runs the units of one of them, and the stage before is what comes before this part.

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
        self._part, self._own = next(iter(parts.items()))
        self._boundaries = boundaries
        self._on_first = on_first
        self._in_full = in_full
        self._received: Any = None
        self._stand_in: Any = None
        self._nans: dict[torch.dtype, Any] = {}
        """Storages full of NaN."""
        self._given: list[tuple[Tensor, int]] = []
        """The stand-ins of this pass that have such a storage, and their versions."""
        self._has_grad = self._is_checked = False
        self.inside = InsideUnits()
        """Of the last pass."""
        self.used: str | None = None
        """A unit from inside of which code of the passes that were checked used a tensor, until it is set."""
        self.next_unit: int | None = None
        """The position of the unit that is called next; `None` outside of a forward pass."""
        self.hidden: list[tuple[Module, dict[str, Any], str]] = []
        """What modules inside units keep, with the dict that has it; NaN in passes through parts without the module."""
        self.first_nan: int | None = None
        """The first unit of this stage that has returned NaN in the passes that were checked, until it is set."""

    def install(self, undo: ExitStack) -> None:
        """Replace the calls until `undo` is closed."""
        for number, unit in enumerate(self._units):
            _replace_call(unit.module, partial(self._call, number), undo)

    @contextmanager
    def forward_pass(self, part: int, *, is_checked: bool = False) -> Iterator[None]:
        """Allow one call of each unit inside the block.

        Args:
            part: the number of the part whose units run.
            is_checked: whether to note units that return NaN, and to refuse gradients through earlier stages.
        """
        self.next_unit, self._is_checked = 0, is_checked
        self._part, self._own = part, self._parts[part]
        self.inside = InsideUnits()
        self._has_grad = torch.is_grad_enabled()
        own = {each for number in self._own for each in self._units[number].module.modules()} if self.hidden else set()
        hidden = [
            (values, name, values[name]) for module, values, name in self.hidden if module not in own and name in values
        ]
        for values, name, _ in hidden:
            values[name] = torch.tensor(float("nan"))
        try:
            yield
        except Exception as error:
            if isinstance(error, ParalError) or not 0 < self.next_unit < self._own.start:
                raise
            before, after, received = map(self._name, (self.next_unit - 1, self.next_unit, self._own.start - 1))
            raise ConfigurationError(
                f"The step failed between {before} and {after}: {type(error).__name__}: {error}. These units are on an "
                f"earlier stage, so the code between them got NaN in the shape of what {received} returns, the only "
                "output that this stage receives. If the step works in one process, move this code into a unit, or "
                "choose units of which each is called with what the one before returns: units=[...]."
            ) from error
        finally:
            for values, name, value in hidden:
                values[name] = value
            if any(each.is_inference() or version_of(each) != version for each, version in self._given):
                self._nans.clear()  # code between units may have written numbers over NaN
            self._given.clear()
            self.next_unit = self._received = self._stand_in = None

    def note_use(self, result: Tensor) -> None:
        """Note whether `result` of a pass that was checked uses a tensor from inside a unit."""
        if self._is_checked and self.used is None:
            self.used = self.inside.used_by(result)

    def check_complete(self, step: str) -> None:
        """Check inside `forward_pass`, after the step has returned, that all units of this stage were called.

        Raises:
            ConfigurationError: the step did not call all of them.
        """
        if self.next_unit is not None and self.next_unit < len(self._units):
            raise ConfigurationError(
                f"{step} ended without calling {self._name(self.next_unit)}. In a pipeline, every step must call each "
                f"of the units {self._name(0)} ... {self._name(len(self._units) - 1)} once, in this order."
            )

    def _call(self, number: int, run: Call, args: Any, kwargs: Any) -> Any:
        """Do what calling unit `number` does on this stage; `run` runs the unit."""
        if self._boundaries.is_in_backward:  # activation checkpointing calls it again
            return run(*args, **kwargs)
        self._check_call(number)
        if number == 0:
            self._on_first()
            if self._own.start > 0:
                self._received = self._boundaries.receive(self._part)
            if self._own.start > 1:
                self._stand_in = tree_map_only(Tensor, self._nan_like, self._received)
        self.next_unit = number + 1
        if number < self._own.start:
            output = self._received if number == self._own.start - 1 else self._stand_in
            if self._is_checked:
                given = [each for each in tree_leaves((args, kwargs)) if _requires_grad(each)]
                output = tree_map_only(Tensor, partial(_of_earlier_stage, given), output)
            return output

        def compute() -> Any:
            return self._in_full(run(*args, **kwargs))

        output = self.inside.run(self._name(number), compute) if self._is_checked else compute()
        if self._is_checked and self.first_nan is None and _has_nan(output):
            self.first_nan = number
        if number == self._own.stop - 1 and number < len(self._units) - 1:
            raise StageDone(self._boundaries.send(output, self._part, self._name(number)))
        return output

    def _nan_like(self, received: Tensor) -> Tensor:
        """Return NaN in the shape of `received`, which code between the units may write to."""
        if not (received.is_floating_point() or received.is_complex()):
            return received.clone()
        if self._is_checked:
            return received + float("nan")
        storage = self._nans.get(received.dtype)  # shared by all passes, because filling it takes time
        if storage is None or storage.nbytes() < received.nbytes:
            storage = torch.full_like(received, float("nan")).untyped_storage()
            self._nans[received.dtype] = storage
        nan: Tensor = _Nan.apply(received, storage)  # type: ignore[no-untyped-call]
        self._given.append((nan, -1 if nan.is_inference() else version_of(nan)))
        return nan

    def _check_call(self, number: int) -> None:
        if self.next_unit is None:
            raise ConfigurationError(
                f"{self._name(number)} was called outside of a training, validation, test or predict step. Under "
                "paral_pp it is on one stage only, and stages run their units in steps only. Move the call into a "
                "step, or train with paral_fsdp."
            )
        if number != self.next_unit:
            before = f"after {self._name(self.next_unit - 1)}" if self.next_unit else "first"
            raise ConfigurationError(
                f"{self._name(number)} was called {before}. In a pipeline, every step must call each of the units "
                f"{self._name(0)} ... {self._name(len(self._units) - 1)} once, in this order. Choose units that are "
                "called so with units=[...], or train with paral_fsdp."
            )
        if self._has_grad and not torch.is_grad_enabled() and any(map(_requires_grad, self._parameters(number))):
            raise ConfigurationError(
                f"{self._name(number)} has trained parameters, but was called without gradients, so none could be sent "
                "between stages. Under torch.no_grad(), freeze the parameters: requires_grad_(False). For "
                "torch.utils.checkpoint.checkpoint, set use_reentrant=False, or give "
                "ParalPipelineStrategy(activation_checkpointing=...)."
            )
        if is_in_transform():
            raise ConfigurationError(
                f"{self._name(number)} was called inside a transform of torch.func, or with forward-mode AD, which "
                "cannot pass through the stages of a pipeline. Train with paral_ddp."
            )

    def _parameters(self, number: int) -> Iterator[Tensor]:
        return self._units[number].module.parameters()

    def _name(self, number: int) -> str:
        return self._units[number].name


class InsideUnits:
    """Finds uses of tensors from inside units, such as those that hooks collect, in the graph of one forward pass.

    Other stages do not run these units, so they lack these tensors. The outputs of the units are cloned. A path into
    the nodes that a unit has created, other than by these clones, is such a use.
    """

    def __init__(self) -> None:
        self._units: list[tuple[str, range]] = []
        self._outputs: set[int] = set()

    def run(self, name: str, run: Callable[[], Any]) -> Any:
        """Return what the unit `name` returns; `run` runs it."""
        first = _next_sequence_number()
        output = run()
        self._units.append((name, range(first, _next_sequence_number())))
        return tree_map_only(Tensor, self._clone, output)

    def _clone(self, output: Tensor) -> Tensor:
        clone = output.clone()
        if clone.grad_fn is not None:
            self._outputs.add(sequence_number(clone.grad_fn))
        return clone

    def used_by(self, result: Tensor) -> str | None:
        """Return the name of a unit from inside of which `result` uses a tensor, if there is one."""
        seen: set[Any] = {None}
        remaining: list[Any] = [result.grad_fn]
        while remaining:
            node = remaining.pop()
            if node in seen:
                continue
            seen.add(node)
            unit = self._unit_of(node)
            for after, _ in node.next_functions:
                into = self._unit_of(after)
                is_output = sequence_number(node) in self._outputs
                if into not in (None, unit) and not is_output and not _is_of_parameters(after):
                    return into
                remaining.append(after)
        return None

    def _unit_of(self, node: Any) -> str | None:
        number = -1 if node is None else sequence_number(node)
        return next((name for name, inside in self._units if number in inside), None)


def _next_sequence_number() -> int:
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    return 0 if node is None else sequence_number(node) + 1  # none in inference mode


def _is_of_parameters(node: Any) -> bool:
    """Return whether `node` computes with leaves only, such as a cast that autocast keeps for tied weights."""
    return all(after is None or not after.next_functions for after, _ in node.next_functions)


def replace_end_calls(ends: Sequence[End], calls: UnitCalls, undo: ExitStack) -> None:
    """Replace the calls of modules that other stages hold at an end of the chain, until `undo` is closed.

    The code before the chain runs on all stages, but only the first unit may use what modules of `first_stage` return.
    On later stages, these modules therefore return NaN of the right shape: they run with NaN parameters that take no
    memory.

    Args:
        ends: those that this stage does not hold.
        calls: knows the unit that is called next.
        undo: a stack to which functions that undo the changes are pushed.
    """
    running: set[str] = set()

    def call(end: End, run: Call, args: Any, kwargs: Any) -> Any:
        if end.name in running:
            return run(*args, **kwargs)
        if calls.next_unit != 0 or not end.is_first:
            raise ConfigurationError(
                f"{end.name} was called on a stage that does not have it: {end.option} keeps it on one stage only. "
                "Modules of first_stage can be called before the first unit, modules of last_stage after the last "
                f"one, both in steps only. Leave {end.name!r} out of {end.option}, so that all stages have it."
            )
        values = {name: _nans_like(each) for name, each in end.module.named_parameters()}
        values |= {name: each.clone() for name, each in end.module.named_buffers()}
        running.add(end.name)
        try:
            with torch.no_grad():
                return functional_call(end.module, values, args, kwargs)
        finally:
            running.clear()

    for end in ends:
        _replace_call(end.module, partial(call, end), undo)


def _replace_call(module: Module, call: Callable[[Call, Any, Any], Any], undo: ExitStack) -> None:
    """Make `module(*args, **kwargs)` return `call(run, args, kwargs)` until `undo` is closed; `run` runs the module."""

    class OfStage:
        """A module of a stage, which is not copied during a run."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(super().__call__, args, kwargs)  # type: ignore[misc]

        def __deepcopy__(self, memo: Any) -> NoReturn:
            raise ConfigurationError(
                "A module cannot be copied while it is divided among the stages of a pipeline, because this rank has "
                "only some of its parameters. Copy it before or after the run."
            )

    original = type(module)
    module.__class__ = subclass_of(original, OfStage, {})
    undo.callback(setattr, module, "__class__", original)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has_nan(values: Any) -> bool:
    return any(bool(leaf.isnan().any()) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class _Nan(torch.autograd.Function):
    """NaN in `storage`. It depends on what was received, so that hooks on its gradient can be registered."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, storage: Any) -> Any:
        # No view, so that it can be written to.
        return received.new_empty(0).set_(storage, 0, received.shape, received.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


class _OfEarlierStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *given: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ConfigurationError(THROUGH_STAGES)


def _of_earlier_stage(given: Sequence[Tensor], value: Tensor) -> Tensor:
    """In a checked pass, make `value` depend on the arguments of the unit, and refuse gradients by them."""
    if not value.is_floating_point():
        return value
    output: Tensor = _OfEarlierStage.apply(value, *given)  # type: ignore[no-untyped-call]
    return output


def _nans_like(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
