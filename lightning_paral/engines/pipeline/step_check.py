"""Check a training step before it trains: that a stage lacks nothing, and that the loss of a batch is a mean."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_paral.compat.torch.autograd import identity_of, version_of
from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.data.parts import first_samples, num_samples_of, weighted_mean
from lightning_paral.data.rollback import rollback_side_effects, user_attributes
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.engines.pipeline.boundaries import PipelineGroups
from lightning_paral.engines.pipeline.calls import UnitCalls
from lightning_paral.engines.pipeline.elsewhere import is_elsewhere
from lightning_paral.engines.pipeline.micro_batches import MicroBatchWeights, RandomStreams, generator_states
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.gradients import local_part
from lightning_paral.model.units import Unit

_TOLERANCE = 1e-4
"""Relative to the largest of the compared losses."""
_TOLERANCE_OF_16_BITS = 1e-2
_ROUNDING = 1e-7
"""What a loss that is zero may differ by."""

_LACKING = (
    "In a pipeline, other stages do not have it. Let units return what other code needs, or train with paral_fsdp."
)

Forward = Callable[[Any, bool], Tensor]
"""Runs the step on a batch, and checks the pass if told to. Returns the loss, on other stages what `send` does."""


@dataclass(frozen=True)
class _Found:
    """What a stage has found in the passes."""

    losses: Sequence[float]
    """On the last stage, the loss of all samples, that without what other stages lack, and then those of each."""
    weights: Sequence[float]
    """How much the loss of each sample counts."""
    first_nan: int | None
    kept: Sequence[str]
    """The names of attributes and buffers of units that the pass of all samples has changed."""
    has_drawn: bool
    fault: str | None


class StepCheck:
    """Runs `training_step` on some samples of a batch, and on each of them, without backward pass or side effects.

    Args:
        module: the divided LightningModule.
        units: the units of the chain.
        own: the units of this stage.
        calls: notes units that return NaN.
        streams: notes whether passes draw random numbers.
        groups: the process groups of the run; `None` if there is one stage.
        is_last: whether this is the last stage.
    """

    def __init__(
        self,
        module: LightningModule,
        units: Sequence[Unit],
        own: Sequence[Unit],
        calls: UnitCalls,
        streams: RandomStreams,
        groups: PipelineGroups | None,
        *,
        is_last: bool,
    ) -> None:
        self._module = module
        self._step = f"{type(module).__name__}.training_step"
        self._units = units
        self._own = own
        self._calls = calls
        self._streams = streams
        self._groups = groups
        self._is_last = is_last

    def run(self, batch: Any, forward: Forward, num_samples: int, at_once: int, *, is_first: bool) -> None:
        """Check the step. *Collective* over the pipeline.

        Args:
            batch: a training batch.
            forward: runs the step.
            num_samples: the largest number of samples. If it is 1, because batches are not divided, the step runs on
                the whole batch.
            at_once: the largest number of samples that take no more memory than a training step.
            is_first: whether no optimizer step came before, so that a loss that is NaN is a fault.

        Raises:
            ConfigurationError: the step uses what its stage does not have, changes parameters, gradients or buffers, or
                has a loss that is not the mean of those of the samples. Raised on all stages.
        """
        groups: list[tuple[Any, list[Any]]] = [(batch, [])]
        if num_samples > 1:
            total = num_samples_of(batch) or 1
            num_samples = min(num_samples, total)
            distance, at_once = total // num_samples, max(2, at_once)
            chosen = range(0, distance * num_samples, distance)
            places = [chosen[number : number + at_once] for number in range(0, num_samples, at_once)]
            groups = [
                (first_samples(batch, of.start, of.stop, of.step), [first_samples(batch, at, at + 1) for at in of])
                for of in places
            ]
        trained = [part for part in self._module.modules() if part.training]
        try:
            for whole, singles in groups:
                if self._check(whole, singles, forward, is_first=is_first):  # dropout: compare without it
                    self._module.eval()
                    self._check(whole, singles, forward, is_first=is_first)
        except Exception as error:
            if num_samples > 1 and not isinstance(error, ParalError):
                error.add_note(
                    "It failed when paral_pp, which divides batches, ran training_step on samples of one. If the step "
                    "keeps state of a batch, such as a hidden state, set micro_batches=1, or use paral_fsdp."
                )
            raise
        finally:
            for part in trained:
                part.training = True

    def _check(self, whole: Any, singles: Sequence[Any], forward: Forward, *, is_first: bool) -> bool:
        """Check the step, and return whether its losses could not be compared, because it draws random numbers."""
        with rollback_side_effects(self._module):
            own = self._passes(whole, singles, forward)
        stages = self._of_all(own)
        fault = next((each.fault for each in stages if each.fault is not None), None)
        if fault is not None:
            raise ConfigurationError(f"{self._step} {fault}")
        losses, weights = next((each.losses, each.weights) for each in stages if each.losses)
        loss, without, *of_samples = losses
        nan_units = [each.first_nan for each in stages if each.first_nan is not None]
        has_targets = not weights or any(weights)
        if is_first and self._groups is not None and math.isnan(loss) and (nan_units or has_targets):
            self._refuse_nan(nan_units)
        if math.isnan(without) and not math.isnan(loss):
            raise ConfigurationError(
                f"The loss of {self._step} depends on what units keep in attributes, such as {', '.join(own.kept[:4])}."
                f" {_LACKING}"
            )
        if not singles:
            return False
        if any(each.has_drawn for each in stages):
            return True
        precision = self._module.trainer.precision
        tolerance = _TOLERANCE if "32" in precision or "64" in precision else _TOLERANCE_OF_16_BITS
        mean = weighted_mean(of_samples, weights, torch.device("cpu"))
        if abs(loss - mean) > max(_ROUNDING, tolerance * max(map(abs, losses))):  # not if it is NaN
            raise ConfigurationError(
                f"The loss of {self._step} is not a mean over samples, nor over the targets of a cross entropy, or it "
                "depends on the batch before, such as by a hidden state or a counter in an attribute: it is "
                f"{loss:.6g} for {len(of_samples)} samples of a batch, but the mean of their losses, computed one "
                f"after the other, is {mean:.6g}. A pipeline divides batches into micro-batches and averages their "
                "losses, so it would train differently than one process. Set micro_batches=1, or train with "
                "paral_fsdp. If the difference is intended, set check_steps=False."
            )
        return False

    def _passes(self, whole: Any, singles: Sequence[Any], forward: Forward) -> _Found:
        streams, weights = self._streams, MicroBatchWeights([1] * len(singles))
        before, kept = _sums(self._module.named_parameters()), self._kept_by_units()
        generators = generator_states()
        streams.is_watching, streams.has_drawn = True, False
        try:
            with _watched_gradients(self._module) as have_changed:
                self._calls.first_nan = self._calls.used = None
                losses = [forward(whole, True).detach()] * 2
                first_nan, used = self._calls.first_nan, self._calls.used
                now = self._kept_by_units()
                changed_by_units = self._hide([key for key, value in now.items() if value != kept.get(key)])
                if changed_by_units:
                    losses[1] = forward(whole, False).detach()
                    self._calls.hidden.clear()
                buffers = _sums(self._buffers())
                for number, single in enumerate(singles):
                    result = forward(single, False)
                    if self._is_last:
                        weights.weighted(number, result)
                    losses.append(result.detach())
                    del result  # the graph, which takes memory
                has_changed_gradients = have_changed()
        finally:
            streams.is_watching = False
        fault = None
        changed = _changed(before, _sums(self._module.named_parameters()))
        if changed is not None:
            fault = (
                f"changes the parameter {changed}. In a pipeline, the stages run different parts of training_step, "
                "each once per micro-batch. Change parameters in on_train_batch_end, or train with paral_fsdp."
            )
        elif has_changed_gradients:
            fault = (
                "changes gradients of parameters, as zero_grad and backward() do. In a pipeline, it runs once per "
                "micro-batch, whose gradients are added up. Leave it out: Lightning calls both."
            )
        elif singles and (changed := _changed(buffers, _sums(self._buffers()))) is not None:
            fault = (
                f"changes the buffer {changed}: after the samples of a batch, one after the other, it has another "
                "value than after the whole batch. A pipeline computes micro-batches, so it would train differently "
                "than one process. Set micro_batches=1, or train with paral_fsdp. If the difference is intended, set "
                "check_steps=False."
            )
        elif used is not None:
            fault = f"uses a tensor from inside {used}, such as one that a hook collects. {_LACKING}"
        has_drawn = streams.has_drawn or generators != generator_states()
        known = [float(each) for each in losses] if self._is_last else []
        return _Found(known, weights.known()[0], first_nan, changed_by_units, has_drawn, fault)

    def _parts_of_stage(self) -> Iterator[tuple[str, Module]]:
        parts = {part for unit in self._own for part in unit.module.modules()}
        return ((name, part) for name, part in self._module.named_modules() if part in parts)

    def _kept_by_units(self) -> dict[tuple[str, str], Any]:
        """Return by module and name what changes with the attributes and buffers of this stage's units."""
        return {
            (name, attribute): identity_of(value) if isinstance(value, Tensor) else repr(value)
            for name, part in self._parts_of_stage()
            if not isinstance(part, Metric)
            for attribute, value in (user_attributes(part) | own_buffers(part)).items()
            if isinstance(value, Tensor) or type(value) in (int, float)
        }

    def _hide(self, changed: list[tuple[str, str]]) -> list[str]:
        """Make what units of other stages have changed NaN here, and return the names of all. *Collective*.

        What units of this stage have changed is NaN in passes through other parts, which may be of other micro-batches.
        """
        own, modules = dict(self._parts_of_stage()), dict(self._module.named_modules())
        attributes: list[str] = []
        buffers: list[str] = []
        for name, attribute in dict.fromkeys(key for of_stage in self._of_all(changed) for key in of_stage):
            is_buffer = attribute in own_buffers(modules[name])
            (buffers if is_buffer else attributes).append(f"{name}.{attribute}")
            values: Any = own_buffers(modules[name]) if is_buffer else vars(modules[name])
            if name in own:
                self._calls.hidden.append((modules[name], values, attribute))
            else:
                values[attribute] = torch.tensor(float("nan"))
        return attributes + buffers

    def _of_all(self, value: Any) -> list[Any]:
        return [value] if self._groups is None else gather_objects(value, self._groups.values)

    def _refuse_nan(self, units: Sequence[int]) -> None:
        user = self._units[min(units)].name if units else "the code after the last unit"
        raise ConfigurationError(
            f"The loss of {self._step} is NaN on the first samples, and {user} is the first to return NaN. A unit may "
            "use only what the unit before it returns, and the code after the last unit only what that one returns: in "
            "a pipeline, what earlier units and modules of first_stage return is NaN there. If the loss is no NaN in "
            "one process, choose other units with units=[...], leave modules out of first_stage, or train with "
            "paral_fsdp."
        )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        metrics = tuple(f"{name}." for name, part in self._module.named_modules() if isinstance(part, Metric))
        return (pair for pair in self._module.named_buffers() if not pair[0].startswith(metrics))


def _sums(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """Return two sums over each tensor that this stage has, by which changes are found."""
    sums: dict[str, list[float]] = {}
    for name, tensor in tensors:
        if not (is_elsewhere(tensor) or tensor.is_meta):
            values = local_part(tensor.detach())
            values = torch.view_as_real(values) if values.is_complex() else values
            sums[name] = [float(each.sum(dtype=torch.float64)) for each in (values, values * values)]
    return sums


def _changed(before: dict[str, list[float]], after: dict[str, list[float]]) -> str | None:
    """Return the name of a tensor whose sums differ; NaN counts as equal to NaN."""
    return next((name for name, sums in before.items() if repr(after.get(name, sums)) != repr(sums)), None)


@contextmanager
def _watched_gradients(module: Module) -> Iterator[Callable[[], bool]]:
    """Give parameters zero gradients inside the block; yield what tells whether they have changed."""
    own = (each for each in module.parameters() if each.requires_grad and not is_elsewhere(each))
    kept = [(each, each.grad) for each in own if not isinstance(each, DTensor)]  # split ones get no plain tensor
    shown = [torch.zeros_like(each) for each, _ in kept]
    for (parameter, _), zeros in zip(kept, shown, strict=True):
        parameter.grad = zeros
    try:
        yield lambda: any(
            parameter.grad is not zeros or version_of(zeros) > 0
            for (parameter, _), zeros in zip(kept, shown, strict=True)
        )
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
