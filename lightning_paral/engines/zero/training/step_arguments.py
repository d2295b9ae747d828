"""Pass the closure and other arguments of a step to the optimizer: DeepSpeed calls its `step` without arguments."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_paral.errors import ConfigurationError


class EvaluatedClosure:
    """Stands in for a closure that was evaluated before the step, because ZeRO reduces gradients before a step.

    Args:
        result: the return value of the closure.
        optimizer_class: the class of the optimizer, for messages.
    """

    def __init__(self, result: Any, optimizer_class: type[Optimizer]) -> None:
        self._result = result
        self._optimizer_class = optimizer_class
        self.was_called = False

    def __call__(self) -> Any:
        """Return the result.

        Raises:
            ConfigurationError: it was called before. Another evaluation would need another backward pass.
        """
        if self.was_called:
            raise ConfigurationError(
                f"{self._optimizer_class.__name__}.step evaluates its closure more than once: it needs several "
                "backward passes per step, which ZeRO cannot do. Train with paral_ddp, or choose an optimizer that "
                "needs only one."
            )
        self.was_called = True
        return self._result


def closure_arguments(optimizer: Optimizer, result: Any) -> dict[str, EvaluatedClosure]:
    """Return keyword arguments that pass `optimizer.step` a closure returning `result`; none if it takes no closure."""
    if not _takes_closure(type(optimizer).step):
        return {}
    return {"closure": EvaluatedClosure(result, type(optimizer))}


@cache
def _takes_closure(step: Callable[..., Any]) -> bool:
    parameters = inspect.signature(step).parameters
    return "closure" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class StepArguments:
    """Passes arguments to the steps of one engine.

    Args:
        zero_optimizer: DeepSpeed's optimizer, which contains the optimizers that get the arguments.
    """

    def __init__(self, zero_optimizer: Any) -> None:
        self._result: Any = None
        self._others: dict[str, Any] | None = None
        for name in ("optimizer", "backup_optimizer"):
            inner = getattr(zero_optimizer, name, None)
            if isinstance(inner, Optimizer):
                inner.step = self._with_arguments(inner)  # type: ignore[method-assign]

    @contextmanager
    def use(self, result: Any, others: dict[str, Any]) -> Iterator[None]:
        """Call `step` with a closure that returns `result`, and with `others` by name, inside this context."""
        self._result, self._others = result, others
        try:
            yield
        finally:
            self._result = self._others = None

    def _with_arguments(self, optimizer: Optimizer) -> Callable[..., Any]:
        step = optimizer.step

        def step_with_arguments(*args: Any, **kwargs: Any) -> Any:
            if self._others is None or args:
                return step(*args, **kwargs)
            closure = closure_arguments(optimizer, self._result)
            result = step(**(closure | self._others | kwargs))
            # Under manual optimization there is no closure, and the result is `None`.
            if self._result is not None and not all(each.was_called for each in closure.values()):
                raise MisconfigurationException(
                    "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your "
                    "`optimizer_step` hook? It could also happen because the `optimizer.step(optimizer_closure)` call "
                    "did not execute it internally."
                )
            return result

        return step_with_arguments
