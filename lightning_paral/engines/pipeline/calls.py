"""What calling a unit does on a stage: run it, receive what an earlier stage computed, or leave the step."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from lightning_paral.compat.torch.autograd import is_in_transform
from lightning_paral.compat.torch.modules import subclass_of
from lightning_paral.engines.pipeline.boundaries import Boundaries
from lightning_paral.engines.pipeline.derivatives import EarlierStages, refuse_gradients_through_stages
from lightning_paral.engines.pipeline.ends import NotCopied
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.units import Unit

Call = Callable[..., Any]
BEFORE_UNITS = -1
"""Stands for the modules of `first_stage` where positions of units are given."""


class StageDone(BaseException):
    """Leaves a step of the user after the last unit of a stage.

    It is no `Exception`, so that user code that catches exceptions lets it pass.
    """

    def __init__(self, sent: Tensor) -> None:
        super().__init__()
        self.sent = sent


class Observer(Protocol):
    """Sees the calls of units in one forward pass."""

    def before(self, unit: int) -> None:
        """Called before a unit of this stage runs."""

    def after(self, unit: int, output: Any) -> Any:
        """Return what the call of a unit, of this or an earlier stage, returns instead of `output`.

        `BEFORE_UNITS` instead of a unit is a module of `first_stage` that this stage lacks.
        """


class UnitCalls:
    """Replaces the calls of all units of the chain during a run.

    Units must be called once each, in order. On a stage, the first call receives the output of the last unit of the
    stage before, and the calls of all units of earlier stages return it. The call of the last unit of a stage sends its
    output and raises `StageDone`, except on the last stage.

    Args:
        units: the units of the chain, in the order in which they are called.
        own: the positions of the units of this stage.
        boundaries: connects this stage with its neighbors.
        on_first: called when the first unit of the chain is called.
    """

    def __init__(self, units: Sequence[Unit], own: range, boundaries: Boundaries, on_first: Callable[[], None]) -> None:
        self._units = units
        self._own = own
        self._boundaries = boundaries
        self._on_first = on_first
        self._expected: int | None = None
        self._received: Any = None
        self._observer: Observer | None = None
        self._has_grad = False
        self._earlier = EarlierStages(units[: own.start])
        self.is_in_backward = False
        """Set it during backward passes, in which activation checkpointing calls units again."""

    def install(self, undo: ExitStack) -> None:
        """Replace the calls until `undo` is closed."""
        for number, unit in enumerate(self._units):
            original = type(unit.module)
            unit.module.__class__ = subclass_of(original, _unit_class(self, number), {})
            undo.callback(setattr, unit.module, "__class__", original)
        undo.callback(
            refuse_gradients_through_stages(lambda: self.is_in_pass and not self.is_in_backward, self._earlier)
        )

    @contextmanager
    def forward_pass(self, observer: Observer | None = None) -> Iterator[None]:
        """Allow one call of each unit inside the block."""
        self._expected, self._observer = 0, observer
        self._has_grad = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._expected = self._observer = self._received = None
            self._earlier.clear()

    @property
    def is_in_pass(self) -> bool:
        """Whether a forward pass is running."""
        return self._expected is not None

    @property
    def next_unit(self) -> int | None:
        """The position of the unit that is called next; `None` outside of a forward pass."""
        return self._expected

    def given_to_end(self, arguments: Any) -> None:
        """Note what a module of `first_stage`, which this stage lacks, is called with."""
        self._earlier.enter(arguments)

    def returned_by_end(self, output: Any) -> Any:
        """Return what the call of a module of `first_stage`, which this stage lacks, returns instead of `output`."""
        return self._observed(BEFORE_UNITS, output)

    def check_complete(self, step: str) -> None:
        """Check inside `forward_pass`, after the step has returned, that all units of this stage were called.

        Raises:
            ConfigurationError: the step did not call all of them.
        """
        if self._expected is not None and self._expected < len(self._units):
            raise ConfigurationError(
                f"{step} ended without calling {self._name(self._expected)}. In a pipeline, every step must call each "
                f"of the units {self._name(0)} ... {self._name(len(self._units) - 1)} once, in this order."
            )

    def explain(self, step: str, error: Exception) -> str | None:
        """Return why code between units of earlier stages, whose outputs this stage lacks, may have raised `error`.

        `None` if it was raised elsewhere, or if its message says why. Call this inside `forward_pass`.
        """
        if isinstance(error, ParalError) or self._expected is None or not 0 < self._expected < self._own.start:
            return None
        before, after, received = map(self._name, (self._expected - 1, self._expected, self._own.start - 1))
        return (
            f"{step} failed between {before} and {after}: {type(error).__name__}: {error}. These units are on an "
            f"earlier stage, so the code between them got the output of {received} on this stage, the only one that it "
            "receives. If the step works in one process, move this code into a unit, or choose units of which each is "
            "called with what the one before returns: units=[...]."
        )

    def call(self, number: int, run: Call, args: Any, kwargs: Any) -> Any:
        """Do what calling unit `number` does on this stage; `run` runs the unit."""
        if self.is_in_backward:
            return run(*args, **kwargs)
        if self._expected is None:
            raise ConfigurationError(
                f"{self._name(number)} was called outside of a training, validation, test or predict step. Under "
                "paral_pp it is on one stage only, and stages run their units in steps only. Move the call into a "
                "step, or train with paral_fsdp."
            )
        if number != self._expected:
            self._refuse_order(number)
        if self._has_grad and not torch.is_grad_enabled() and _is_in_reentrant_checkpoint():
            raise ConfigurationError(
                f"{self._name(number)} was called inside torch.utils.checkpoint.checkpoint(use_reentrant=True), which "
                "computes without gradients at first, so they could not be sent between stages. Set "
                "use_reentrant=False, or give ParalPipelineStrategy(activation_checkpointing=...)."
            )
        if is_in_transform():
            raise ConfigurationError(
                f"{self._name(number)} was called inside a transform of torch.func, or with forward-mode AD. In a "
                "pipeline, each stage runs its own units only, so a transform cannot pass through all of them. Train "
                "with paral_ddp."
            )
        if number == 0:
            self._on_first()
        if number < self._own.start:
            self._earlier.enter((args, kwargs))
            if number == 0:
                self._received = self._boundaries.receive()
                self._earlier.leave(self._received)
            self._expected += 1
            return self._observed(number, self._received)
        self._expected += 1
        if self._observer is not None:
            self._observer.before(number)
        output = self._observed(number, run(*args, **kwargs))
        if number == self._own.stop - 1 and number < len(self._units) - 1:
            raise StageDone(self._boundaries.send(output, self._name(number)))
        return output

    def _observed(self, number: int, output: Any) -> Any:
        return output if self._observer is None else self._observer.after(number, output)

    def _refuse_order(self, number: int) -> NoReturn:
        assert self._expected is not None
        before = f"after {self._name(self._expected - 1)}" if self._expected else "first"
        raise ConfigurationError(
            f"{self._name(number)} was called {before}. In a pipeline, every step must call each of the units "
            f"{self._name(0)} ... {self._name(len(self._units) - 1)} once, in this order. Choose units that are called "
            "so with units=[...], or train with paral_fsdp."
        )

    def _name(self, number: int) -> str:
        return self._units[number].name


def _is_in_reentrant_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _unit_class(calls: UnitCalls, number: int) -> type:
    class UnitOfStage(NotCopied):
        """A unit of the chain, whose calls `UnitCalls` replaces."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return calls.call(number, super().__call__, args, kwargs)  # type: ignore[misc]

    return UnitOfStage
