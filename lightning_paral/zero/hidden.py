"""Gradients that hooks look for where they are not: reading `parameter.grad` is an error, not an empty answer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.errors import ParalError

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class HiddenGradientError(ParalError, RuntimeError):
    """A hook read `parameter.grad`, which is empty under ZeRO."""


def _refuse(parameter: Parameter) -> NoReturn:
    raise HiddenGradientError(
        "parameter.grad was read in a hook, but under ZeRO each rank holds its part of the gradients only, and not "
        "there. Read whole gradients with `self.trainer.strategy.full_gradient(parameter)`, their norm with "
        "`self.trainer.strategy.gradient_norm()`, and clip with `self.clip_gradients(optimizer, ...)`."
    )


_gradient: Any = Tensor.grad


class _WithHiddenGradient(Parameter):
    grad = property(_refuse, _gradient.__set__, _gradient.__delete__)


class GradientGuard:
    """While hooks of the user's run, makes reading `.grad` an error; they would find `None`, and silently do nothing.

    Args:
        parameters: those that are trained.
        trainer: of the run; where no hook of its module or callbacks could read gradients, nothing is guarded.
    """

    def __init__(self, parameters: Iterable[Parameter], trainer: Trainer) -> None:
        guarded = has_gradient_hooks(trainer)
        # By class, and only of plain parameters: a subclass of the user's may have a layout of its own.
        self._parameters: list[Any] = [p for p in parameters if guarded and p.requires_grad and type(p) is Parameter]
        self._is_up = False

    @contextmanager
    def up(self) -> Iterator[None]:
        """Guard the gradients while hooks run."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let DeepSpeed look at `.grad`, on behalf of a hook."""
        was_up = self._is_up
        self._set(False)
        try:
            yield
        finally:
            self._set(was_up)

    def _set(self, up: bool) -> None:
        if up != self._is_up:
            for parameter in self._parameters:
                parameter.__class__ = _WithHiddenGradient if up else Parameter
        self._is_up = up


def has_gradient_hooks(trainer: Trainer) -> bool:
    """Whether the module or a callback overrides a hook in which people read gradients."""
    module: LightningModule = trainer.lightning_module
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(hook, module) for hook in _HOOKS) or any(
        is_overridden(hook, callback) for hook in _HOOKS[:2] for callback in callbacks
    )
