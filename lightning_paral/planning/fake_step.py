"""Follow one training step of a module on tensors without memory."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_paral.compat.lightning.device_property import set_device_everywhere
from lightning_paral.compat.torch.fake_tensors import fake_tensor_mode
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.activation_checkpointing import checkpoint_units
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.fake_module import become_fake, check_not_lazy, fake_of
from lightning_paral.planning.fake_trainer import PlanningTrainer, attach, use_optimizers
from lightning_paral.planning.memory_trace import MemoryTrace
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates, assume_adam, count_states
from lightning_paral.planning.timeline import Kind, Timeline, without_activations
from lightning_paral.planning.unit_marks import mark_units, planned_units, tensors_in

Found = TypeVar("Found")


class StepFollower:
    """A module on tensors without memory, and its optimizers.

    The module cannot be used for anything else afterwards, so create this in a process of its own: see `run_isolated`.

    Args:
        module: its parameters may be on any device, including meta.
        settings: the Trainer's settings.
        datamodule: what `trainer.datamodule` is in the module's hooks.
        is_set_up: whether `setup("fit")` has been called.
    """

    def __init__(
        self,
        module: LightningModule,
        settings: StepSettings,
        datamodule: LightningDataModule | None = None,
        *,
        is_set_up: bool = False,
    ) -> None:
        self.module, self._settings = module, settings
        self.trainer = PlanningTrainer(settings)
        attach(module, self.trainer, datamodule)
        if not is_set_up:
            module.setup("fit")
        self._early_bytes = sum(each.numel() * each.element_size() for each in module.parameters() if not is_lazy(each))
        with torch.device("meta"):
            module.configure_model()
        check_not_lazy(module)
        self.mode = fake_tensor_mode()
        with self.mode:
            become_fake(module, self.mode, settings.parameter_dtype)
            module.train()
        set_device_everywhere(module, torch.device("cpu"))  # `self.device` of a module that was built on meta
        self.units = planned_units(module)
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self._have_gradients: list[bool] = []
        self._was_followed = False

    def configure_optimizers(self) -> None:
        """Create the optimizers of the module.

        Raises:
            ConfigurationError: `configure_optimizers` failed.
        """
        try:
            with self.mode:
                configured = self.module.configure_optimizers()
                self.optimizers = list(_found_in(configured, Optimizer))
                self.schedulers = list(_found_in(configured, LRScheduler))
        except Exception as error:
            raise ConfigurationError(
                f"{type(self.module).__name__}.configure_optimizers() failed on a module whose tensors have no values: "
                f"{type(error).__name__}: {error}"
            ) from error

    def states(self) -> ModelStates:
        """Count the states. Optimizers are assumed to be like Adam if no step could be followed."""
        states = replace(count_states(self.module, self.optimizers), early_bytes=self._early_bytes)
        return states if self._was_followed else assume_adam(states)

    def follow(self, batch: Any, checkpointing: ActivationCheckpointing | None = None) -> Timeline:
        """Return what a step on a batch of the shapes of `batch` allocates.

        Args:
            batch: what the training loader yields, with real or fake tensors.
            checkpointing: the units whose activations are recomputed in the backward pass.

        Raises:
            Exception: whatever the module raises, for example because it needs values of tensors.
        """
        undo = checkpoint_units(self.module, checkpointing) if checkpointing is not None else None
        try:
            with self.mode:
                return self._follow(batch)
        finally:
            if undo is not None:
                undo()

    def _follow(self, batch: Any) -> Timeline:
        batch = apply_to_collection(batch, Tensor, lambda tensor: fake_of(tensor.detach(), self.mode))
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.on_after_batch_transfer(batch, 0)
        batch = self.trainer.precision_plugin.convert_input(batch)
        trace = MemoryTrace()
        trace.ignore_parameters(self.module.parameters())
        trace.ignore(self.module.buffers())
        trace.ignore(tensors_in(batch))
        hooks = mark_units(self.module, self.units, self.optimizers, trace)
        try:
            with trace:
                self._take_step_before(batch, trace)
                for optimizer in self.optimizers:
                    states = [tensor for state in optimizer.state.values() for tensor in tensors_in(state)]
                    trace.become(states, Kind.END)
                trace.moments.clear()
                self._step(batch, trace)
        finally:
            for hook in hooks:
                hook.remove()
            self._have_gradients = [parameter.grad is not None for parameter in self.module.parameters()]
            for parameter in self.module.parameters():
                parameter.grad = None
        self._was_followed = True
        initial = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
        return Timeline(
            moments=trace.moments, units=self.units, initial_bytes=initial, notes=tuple(sorted(trace.notes))
        )

    def _take_step_before(self, batch: Any, trace: MemoryTrace) -> None:
        """Create the optimizer states and the gradients that exist when a step begins."""
        if not self._have_gradients or not self.module.automatic_optimization:
            self._step(batch, trace)
            return
        # An earlier call has created the optimizer states, and knows which gradients a step leaves.
        for index, parameter in enumerate(self.module.parameters()):
            if self._have_gradients[index]:
                parameter.grad = torch.empty_like(parameter)
                trace.become_gradient(parameter.grad, index)

    def _step(self, batch: Any, trace: MemoryTrace) -> None:
        """Run a step in Lightning's order. With accumulation, two micro-batches stand for all of them."""

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            trace.mark(Kind.BACKWARD)
            trace.mark(Kind.ENTER_BACKWARD, len(self.units) - 1)
            torch.autograd.backward(loss, *args, **kwargs)

        use_optimizers(self.module, self.optimizers, self.schedulers, backward)
        for number in range(min(2, self._settings.accumulate)):
            trace.mark(Kind.ENTER_FORWARD, len(self.units) - 1)
            with self.trainer.precision_plugin.forward_context():
                output: Any = self.module.training_step(*_arguments(self.module, batch))
            trace.mark(Kind.LEAVE_FORWARD, len(self.units) - 1)
            loss = output.get("loss") if isinstance(output, dict) else output
            del output
            if not self.module.automatic_optimization:
                del loss
                continue
            if number == 0:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            if loss is None:
                raise ConfigurationError(f"{type(self.module).__name__}.training_step returned None, not a loss.")
            if self._settings.accumulate > 1:
                loss = loss / self._settings.accumulate
            backward(loss)
            del loss
        if self.module.automatic_optimization:
            if self._settings.clip_value:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.clip_value)
            for optimizer in self.optimizers:
                optimizer.step()


def states_alone(follower: StepFollower, reason: str) -> Timeline:
    """Return a timeline without activations, for a module whose step cannot be followed."""
    sizes = [state.gradient_bytes for state in follower.states().parameters]
    return without_activations(follower.units, sizes, reason)


def _found_in(configured: Any, kind: type[Found]) -> Iterator[Found]:
    """Yield the objects of a kind in what `configure_optimizers` returns."""
    if isinstance(configured, kind):
        yield configured
    elif isinstance(configured, dict):
        for part in configured.values():
            yield from _found_in(part, kind)
    elif isinstance(configured, list | tuple):
        for part in configured:
            yield from _found_in(part, kind)


def _arguments(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """Return the arguments of `training_step`, which may or may not take the number of the batch."""
    parameters = list(inspect.signature(module.training_step).parameters.values())
    takes_number = len(parameters) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return (batch, 0) if takes_number else (batch,)
