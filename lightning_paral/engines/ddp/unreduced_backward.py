"""Detect backward passes whose gradients DDP does not average, because they bypass the strategy."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch.autograd import call_at_end_of_backward
from lightning_paral.errors import ConfigurationError


class UnreducedBackwardGuard:
    """Rejects optimizer steps that use gradients of a `loss.backward()` that DDP did not average.

    Args:
        is_manual: whether the module uses manual optimization.
    """

    def __init__(self, *, is_manual: bool) -> None:
        self._is_manual = is_manual
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._is_reduced = self._in_strategy_step = False
        self._unreduced: set[Tensor] = set()
        self._step_hook = register_optimizer_step_pre_hook(self._check_step)

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Watch for unreduced gradients of `parameters`, all of which must require gradients at this time."""
        for parameter in parameters:
            if parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle

    def _note_gradient(self, parameter: Tensor) -> None:
        if not self._is_reduced:
            self._unreduced.add(parameter)

    def expect(self, loss: Tensor) -> None:
        """Treat the backward pass of `loss` as averaged, but not those that hooks run before and after it."""
        loss.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        self._drop_zeroed()
        self._is_reduced = True
        call_at_end_of_backward(self._end)

    def _end(self) -> None:
        self._is_reduced = False

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Treat backward passes inside the block as averaged."""
        self._drop_zeroed()
        before, self._is_reduced = self._is_reduced, True
        try:
            yield
        finally:
            self._is_reduced = before

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Treat the step of `optimizer` inside the block as the strategy's own.

        Raises:
            ConfigurationError: the step, or its closure, used gradients that were not averaged.
        """
        self._in_strategy_step = True
        try:
            yield
        finally:
            self._in_strategy_step = False
        if not self._is_manual:
            self._check_gradients(optimizer)

    def _drop_zeroed(self) -> None:
        if self._unreduced:
            self._unreduced = {p for p in self._unreduced if p.grad is not None and bool(p.grad.any())}

    def _check_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._in_strategy_step and not self._is_manual:
            return  # the closure zeroes gradients first; they are checked after the step
        if (
            isinstance(optimizer, LBFGS)
            and not self._in_strategy_step
            and _parameters_of(optimizer) & self._handles.keys()
        ):
            raise ConfigurationError(
                "LBFGS.step was not called through the strategy, so each rank would choose its step size by its own "
                "loss. Take the optimizer from self.optimizers()."
            )
        self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        self._drop_zeroed()
        if self._unreduced and _parameters_of(optimizer) & self._unreduced:
            raise ConfigurationError(
                "Some gradients come from loss.backward(), which bypasses DDP: the ranks did not average them. Under "
                "manual optimization call self.manual_backward(loss) instead; in hooks use torch.autograd.grad for "
                "gradients that the optimizer does not use."
            )

    def end(self) -> None:
        """Remove all hooks."""
        self._step_hook.remove()
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}


def _parameters_of(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}
