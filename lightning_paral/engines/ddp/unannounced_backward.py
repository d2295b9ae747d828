"""Backward passes that nobody announced: DDP averages the gradients of those alone that it was prepared for."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch.backward import at_end_of_backward
from lightning_paral.errors import ConfigurationError


class AnnouncedBackward:
    """Refuses steps of any optimizer with gradients that came by a `loss.backward()` which no rank averages."""

    def __init__(self, *, is_manual: bool) -> None:
        self._is_manual = is_manual
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._is_running = self._is_ours = False
        self._unannounced: set[Tensor] = set()
        self._of_steps = register_optimizer_step_pre_hook(self._check)

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Notice gradients of `parameters`, which require them now."""
        for parameter in parameters:
            if parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle

    def _note(self, parameter: Tensor) -> None:
        if not self._is_running:
            self._unannounced.add(parameter)

    def expect(self, loss: Tensor) -> None:
        """Say that the backward pass of `loss` is averaged: not those of hooks before and after it."""
        loss.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        self._forget_those_set_to_zero()
        self._is_running = True
        at_end_of_backward(self._end)

    def _end(self) -> None:
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Say that backward passes inside the block are averaged."""
        self._forget_those_set_to_zero()
        before, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = before

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Say that the step of `optimizer` inside the block is the strategy's.

        Raises:
            ConfigurationError: as `AnnouncedBackward`, at the end where gradients come in the step's closure.
        """
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False
        if not self._is_manual:
            self._check_gradients(optimizer)

    def _forget_those_set_to_zero(self) -> None:
        if self._unannounced:
            self._unannounced = {p for p in self._unannounced if p.grad is not None and bool(p.grad.any())}

    def _check(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_ours and not self._is_manual:
            return  # its closure has yet to set gradients to zero
        if isinstance(optimizer, LBFGS) and not self._is_ours and _held_by(optimizer) & self._handles.keys():
            raise ConfigurationError(
                "LBFGS was stepped beside the strategy, where each rank would decide by its own loss how far to go. "
                "Take it from self.optimizers()."
            )
        self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        self._forget_those_set_to_zero()
        if self._unannounced and _held_by(optimizer) & self._unannounced:
            raise ConfigurationError(
                "Gradients came by loss.backward(), of which DDP knows nothing: the ranks did not average them. Under "
                "manual optimization call self.manual_backward(loss) instead; in hooks take torch.autograd.grad where "
                "gradients are not for the optimizer."
            )

    def end(self) -> None:
        """Watch no more."""
        self._of_steps.remove()
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}


def _held_by(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}
