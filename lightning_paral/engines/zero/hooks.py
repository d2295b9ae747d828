"""Adapt DeepSpeed's hooks and a check of Lightning's to ordinary steps: root hooks, outputs, accumulation schedules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.deepspeed.stage3 import show_outputs_as
from lightning_paral.compat.lightning.strategies import ForwardRedirection, replace_check
from lightning_paral.compat.torch.modules import FORWARD, hooks_in
from lightning_paral.errors import ConfigurationError


class RootHooksOnce(ForwardRedirection):
    """Runs steps through the engine's `forward`, and calls DeepSpeed's hooks on the root module once per step.

    Most steps call `self(...)`, which calls the root module again inside its own call. DeepSpeed's hooks would treat
    that as the start and the end of a forward pass: stage 3 would lose the order of modules by which it prefetches, and
    parameters used after `self(...)` outside their module would not be gathered.

    Args:
        installed: the keys of the hooks that DeepSpeed added to the root module, by the attribute that stores them.
    """

    def __init__(self, installed: dict[str, set[int]]) -> None:
        super().__init__()
        self._installed = installed

    def __call__(
        self, wrapper_module: Module, original_module: LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the method `method_name` of `original_module` inside a call of `wrapper_module`."""
        method, forward = getattr(original_module, method_name), original_module.forward

        def step(*args: Any, **kwargs: Any) -> Any:
            original_module.forward = forward  # type: ignore[method-assign]
            with self._without_installed(original_module):
                return method(*args, **kwargs)

        original_module.forward = step  # type: ignore[method-assign]
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            original_module.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def _without_installed(self, module: Module) -> Iterator[None]:
        """Remove DeepSpeed's hooks inside this context. Hooks that a step adds stay."""
        before = {name: dict(hooks_in(module, name)) for name in FORWARD}
        for name in FORWARD:
            for key in self._installed[name]:
                hooks_in(module, name).pop(key, None)
        try:
            yield
        finally:
            for name in FORWARD:
                hooks = hooks_in(module, name)
                new = {key: hook for key, hook in hooks.items() if key not in before[name]}
                hooks.clear()
                hooks.update(before[name] | new)


def forward_hook_keys(module: Module) -> dict[str, set[int]]:
    """Return the keys of the forward hooks on `module`, by the attribute that stores them."""
    return {name: set(hooks_in(module, name)) for name in FORWARD}


def new_forward_hook_keys(module: Module, before: dict[str, set[int]]) -> dict[str, set[int]]:
    """Return the keys of the forward hooks added to `module` since `forward_hook_keys(module)` returned `before`."""
    return {name: keys - before[name] for name, keys in forward_hook_keys(module).items()}


def allow_any_output(module: Module) -> None:
    """Let every module in `module` return any object; the hooks of stage 3 see only the tensors in it.

    DeepSpeed 0.19.8 searches the output of every module for parameters with `vars(output)`, which fails for numbers and
    strings, and calls `startswith` on the keys of dictionaries. Outputs of steps are affected as well: `predict_step`
    may return a class index or a file name.

    Args:
        module: the module of a stage-3 engine.
    """
    show_outputs_as(module, _tensors_in)


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (list, tuple)):
        values: Any = output
    else:
        values = (output if isinstance(output, dict) else getattr(output, "__dict__", {})).values()
    return [value for value in values if isinstance(value, Tensor)]


def allow_accumulation_schedules(trainer: Trainer) -> None:
    """Let `GradientAccumulationScheduler` work in the next fit."""
    # `on_train_start` of the callback rejects every DeepSpeedStrategy. A function with its other checks replaces it.
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            replace_check(callback, _check_accumulation_schedule)


def _check_accumulation_schedule(callback: GradientAccumulationScheduler, trainer: Trainer, module: Any) -> None:
    if not module.automatic_optimization:
        raise ConfigurationError(
            "GradientAccumulationScheduler works with automatic optimization only. Remove the callback, or leave out "
            "self.automatic_optimization = False."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and GradientAccumulationScheduler "
            "both set the number of batches per step. Remove one."
        )
