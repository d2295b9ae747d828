"""Check that a pipeline trains as one process does: the module, and that its step lacks nothing and has a mean loss."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks, version_of
from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.data.parts import first_samples, num_samples_of, weighted_mean
from lightning_paral.data.rollback import rollback_side_effects
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.calls import Pipeline, UnitCalls
from lightning_paral.engines.pipeline.parameters import is_elsewhere
from lightning_paral.engines.pipeline.schedule import MicroBatchWeights, RandomStreams, generator_states
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.checks import check_embeddings
from lightning_paral.model.gradients import local_part
from lightning_paral.model.units import Unit

# The module


def check_before_fit(module: LightningModule, dims: ParallelDims, *, has_sync_batchnorm: bool) -> None:
    """Raise a `ConfigurationError` if training `module` in a pipeline would not equal training in one process."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name} uses manual optimization. In a pipeline, the backward passes of the micro-batches run inside "
            "training_step, so it cannot call them itself. Use automatic optimization, or train with paral_fsdp."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            f"{name}.training_step takes a `dataloader_iter`, so there is no batch to divide into micro-batches. Take "
            "`batch`, or train with paral_fsdp."
        )
    if has_sync_batchnorm:
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) cannot be used in a pipeline, whose stages run different layers at the same "
            "time. Leave it out, or train with paral_fsdp."
        )
    check_parameter_hooks(module)
    check_embeddings(module, dims.data_size, "a pipeline")


def check_parameter_hooks(module: Module) -> None:
    """Raise a `ConfigurationError` if there is a hook on the gradient of a parameter."""
    for name, parameter in module.named_parameters():
        for hook in (gradient_hooks(parameter) | post_accumulate_grad_hooks(parameter)).values():
            raise ConfigurationError(
                f"{name} has a hook, {getattr(hook, '__qualname__', hook)!r}, from register_hook or "
                "register_post_accumulate_grad_hook. In a pipeline, it would be called once per micro-batch, with a "
                "part of the gradient. Clip with Trainer(gradient_clip_val=...), or train with paral_ddp."
            )


def check_batch_norms(module: Module) -> None:
    """Check before steps with several micro-batches that no BatchNorm in `module` normalizes by its batch.

    One in eval mode, as in a frozen encoder, does not.

    Raises:
        ConfigurationError: one does.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and (layer.training or layer.running_mean is None):
            raise ConfigurationError(
                f"{name} is a BatchNorm, which would normalize each micro-batch on its own, and so train differently "
                "than in one process. Set micro_batches=1, use GroupNorm or LayerNorm, call its eval() if it is "
                "frozen, or train with paral_fsdp."
            )


# The step

_TOLERANCE = 1e-4
"""Relative to the largest of the compared losses."""
_TOLERANCE_OF_16_BITS = 1e-2
_ROUNDING = 1e-7
"""What a loss that is zero may differ by."""

Forward = Callable[[Any, bool], Tensor]
"""Runs the step on a batch, and checks the pass if told to. Returns the loss, on other stages what `send` does."""


@dataclass(frozen=True)
class _Found:
    """What a stage has found in the passes."""

    losses: Sequence[float]
    """On the last stage, the loss of all samples, those of each, and that of all if what is inside of units is NaN."""
    weights: Sequence[float]
    """How much the loss of each sample counts."""
    first_nan: int | None
    has_drawn: bool
    fault: str | None


class StepCheck:
    """Runs `training_step` on some samples of a batch, and on each of them, without backward pass or side effects.

    Args:
        module: the divided LightningModule.
        units: the units of the chain.
        calls: notes units that return NaN.
        streams: notes whether passes draw random numbers.
        pipeline: the pipeline of this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        units: Sequence[Unit],
        calls: UnitCalls,
        streams: RandomStreams,
        pipeline: Pipeline,
    ) -> None:
        self._module = module
        self._step = f"{type(module).__name__}.training_step"
        self._units = units
        self._calls = calls
        self._streams = streams
        self._pipeline = pipeline

    def run(self, batch: Any, forward: Forward, num_samples: int, *, is_first: bool) -> None:
        """Check the step. *Collective* over the pipeline.

        Args:
            batch: a training batch.
            forward: runs the step.
            num_samples: the largest number of samples. If it is 1, because batches are not divided, the step runs on
                the whole batch.
            is_first: whether no optimizer step came before, so that a loss that is NaN is a fault.

        Raises:
            ConfigurationError: the step uses what its stage does not have, changes parameters, gradients or buffers, or
                has a loss that is not the mean of those of the samples. Raised on all stages.
        """
        total = num_samples_of(batch) or 1
        num_samples = min(num_samples, total)
        whole, singles = batch, []
        if num_samples > 1:
            chosen = range(0, total // num_samples * num_samples, total // num_samples)
            whole = first_samples(batch, chosen.start, chosen.stop, chosen.step)
            singles = [first_samples(batch, at, at + 1) for at in chosen]
        trained = [part for part in self._module.modules() if part.training]
        try:
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
            found = self._passes(whole, singles, forward, is_first=is_first)
        stages = gather_objects(found, self._pipeline.values)
        fault = next((each.fault for each in stages if each.fault is not None), None)
        if fault is not None:
            raise ConfigurationError(f"{self._step} {fault}")
        losses, weights = next((each.losses, each.weights) for each in stages if each.losses)
        loss, *of_samples, on_nan = losses
        nan_units = [each.first_nan for each in stages if each.first_nan is not None]
        has_targets = not weights or any(weights)
        if is_first and len(stages) > 1 and math.isnan(loss) and (nan_units or has_targets):
            self._refuse_nan(nan_units)
        if math.isnan(on_nan) and not math.isnan(loss):
            raise ConfigurationError(
                f"The loss of {self._step} uses a value from inside of a unit, such as what a unit keeps in an "
                "attribute, or a hook collects. In a pipeline, other stages do not have it. Let units return what "
                "other code needs, or train with paral_fsdp."
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

    def _passes(self, whole: Any, singles: Sequence[Any], forward: Forward, *, is_first: bool) -> _Found:
        streams, weights = self._streams, MicroBatchWeights([1] * len(singles))
        before = _sums(self._module.named_parameters())
        generators = generator_states()
        streams.is_watching, streams.has_drawn = True, False
        try:
            with _watched_gradients(self._module) as have_changed:
                self._calls.first_nan = None
                losses = [forward(whole, True).detach()]
                first_nan = self._calls.first_nan
                buffers = _sums(self._buffers())
                for number, single in enumerate(singles):
                    result = forward(single, False)
                    if self._pipeline.is_last:
                        weights.weighted(number, result)
                    losses.append(result.detach())
                    del result  # the graph, which takes memory
                has_changed_gradients = have_changed()
        finally:
            streams.is_watching = False
        has_drawn = streams.has_drawn or generators != generator_states()
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
        self._calls.hides_insides = is_first
        try:
            losses.append(forward(whole, False).detach() if is_first else losses[0])
        finally:
            self._calls.hides_insides = False
        known = [float(each) for each in losses] if self._pipeline.is_last else []
        return _Found(known, weights.known()[0], first_nan, has_drawn, fault)

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
