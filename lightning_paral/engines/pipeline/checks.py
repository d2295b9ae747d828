"""Check that a pipeline trains as one process does: the module, and that its step lacks nothing and has a mean loss."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.data.parts import first_samples, num_samples_of, weighted_mean
from lightning_paral.data.rollback import rollback_side_effects
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.calls import Pipeline, UnitCalls
from lightning_paral.engines.pipeline.parameters import is_elsewhere
from lightning_paral.engines.pipeline.schedule import MicroBatchWeights, generator_states
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import check_embeddings
from lightning_paral.model.gradients import local_part

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
_PLUGINS = (Precision, HalfPrecision, DoublePrecision, MixedPrecision)

# The module


def check_before_fit(module: LightningModule, dims: ParallelDims, *, has_sync_batchnorm: bool) -> None:
    """Raise a `ConfigurationError` if training `module` in a pipeline would not equal training in one process."""
    name, plugin = type(module).__name__, module.trainer.precision_plugin
    problem = ""
    if type(plugin) not in _PLUGINS or plugin.precision not in PRECISIONS:  # others may clip or step in their own way
        problem = (
            f"{type(plugin).__name__} (precision={plugin.precision!r}) cannot be used in a pipeline. Set "
            f"Trainer(precision=...) to one of {', '.join(PRECISIONS)}"
        )
    elif not module.automatic_optimization:
        problem = (
            f"{name} uses manual optimization. In a pipeline, the backward passes of the micro-batches run inside "
            "training_step, so it cannot call them itself. Use automatic optimization"
        )
    elif is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        problem = f"{name}.training_step takes a `dataloader_iter`, but a pipeline divides batches. Take `batch`"
    elif has_sync_batchnorm:
        problem = (
            "Trainer(sync_batchnorm=True) cannot be used in a pipeline, whose stages run different layers at the same "
            "time. Leave it out"
        )
    if problem:
        raise ConfigurationError(f"{problem}, or train with paral_fsdp.")
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
_BUFFER = "the buffer "

Forward = Callable[[Any], Tensor]
"""Runs the step on a batch. Returns the loss, on other stages what `send` does."""


class StepCheck:
    """Runs `training_step` on some samples of a batch, and on each of them, without backward pass or side effects.

    Args:
        module: the divided LightningModule.
        calls: notes units that return NaN, or draw random numbers.
        pipeline: the pipeline of this rank.
    """

    def __init__(self, module: LightningModule, calls: UnitCalls, pipeline: Pipeline) -> None:
        self._module = module
        self._step = f"{type(module).__name__}.training_step"
        self._calls = calls
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
        count = min(num_samples, total) if num_samples > 1 else total
        chosen = range(0, total // count * count, total // count)
        whole = first_samples(batch, chosen.start, chosen.stop, chosen.step)
        singles = [first_samples(batch, at, at + 1) for at in chosen] if min(num_samples, total) > 1 else []
        trained = [part for part in self._module.modules() if part.training]
        self._calls.is_checked = True
        try:
            if self._check(whole, singles, forward, is_first=is_first):  # dropout: compare without it
                self._module.eval()
                self._check(whole, singles, forward, is_first=is_first)
        finally:
            self._calls.is_checked = self._calls.hides_insides = False
            for part in trained:
                part.training = True

    def _check(self, whole: Any, singles: Sequence[Any], forward: Forward, *, is_first: bool) -> bool:
        """Check the step, and return whether its losses could not be compared, because it draws random numbers."""
        with rollback_side_effects(self._module), _gradients_of_ones(self._module):
            found = self._passes(whole, singles, forward, is_first=is_first)
        stages = gather_objects(found, self._pipeline.values)
        all_losses, all_weights, nan_units, draws, changes = zip(*stages, strict=True)
        if any(changes):
            raise ConfigurationError(
                f"{self._step} changes {next(filter(None, changes))}. In a pipeline, stages run different parts of it, "
                "each once per micro-batch. Change parameters in on_train_batch_end, leave gradients to Lightning, set "
                "micro_batches=1, or train with paral_fsdp. If the difference is intended, set check_steps=False."
            )
        loss, *of_samples, on_nan = next(filter(None, all_losses))
        weights: Sequence[float] = next(filter(None, all_weights), [])
        if is_first and len(stages) > 1 and math.isnan(loss) and (any(nan_units) or not weights or any(weights)):
            _, user = min(filter(None, nan_units), default=(0, "the code after the last unit"))
            raise ConfigurationError(
                f"The loss of {self._step} is NaN on the first samples, and {user} is the first to return NaN. In a "
                "pipeline, only what the unit before returns is there, and what earlier units and modules of "
                "first_stage return is NaN. If the loss is no NaN in one process, choose other units with units=[...], "
                "leave modules out of first_stage, or train with paral_fsdp."
            )
        if math.isnan(on_nan) and not math.isnan(loss):
            raise ConfigurationError(
                f"The loss of {self._step} uses a value from inside of a unit, such as what it keeps in an attribute, "
                "or a hook collects, which other stages do not have. Let units return it, or train with paral_fsdp."
            )
        if not singles or any(draws):
            return bool(singles)
        precision = self._module.trainer.precision
        tolerance = _TOLERANCE if "32" in precision or "64" in precision else _TOLERANCE_OF_16_BITS
        mean = weighted_mean(of_samples, weights, torch.device("cpu"))
        if abs(loss - mean) > max(_ROUNDING, tolerance * max(map(abs, (loss, *of_samples)))):  # not if it is NaN
            raise ConfigurationError(
                f"The loss of {self._step} is not a mean over samples, nor over the targets of a cross entropy, or it "
                "depends on the batch before, such as by a hidden state or a counter in an attribute: it is "
                f"{loss:.6g} for {len(of_samples)} samples, but the mean of their losses, one after the other, is "
                f"{mean:.6g}. A pipeline averages the losses of micro-batches. Set micro_batches=1, or train with "
                "paral_fsdp. If the difference is intended, set check_steps=False."
            )
        return False

    def _passes(self, whole: Any, singles: Sequence[Any], forward: Forward, *, is_first: bool) -> tuple[Any, ...]:
        """Run the passes, and return what this stage has found.

        Returns:
            On the last stage, the losses of all samples, of each, and of all if what is inside of units is NaN, and how
            much each sample counts. The name of the first unit that has returned NaN. Whether the passes have drawn
            random numbers. What they have changed.
        """
        calls, weights = self._calls, MicroBatchWeights([1] * len(singles))
        before, generators = self._sums(), generator_states()
        calls.has_drawn, calls.hides_insides, calls.first_nan = False, False, None
        losses = [forward(whole).detach()]
        first_nan = calls.first_nan
        # Buffers may change, to what micro-batches set them to as well.
        before |= {name: sums for name, sums in self._sums().items() if name.startswith(_BUFFER)}
        for number, single in enumerate(singles):
            result = forward(single)
            if self._pipeline.is_last:
                weights.weighted(number, result)
            losses.append(result.detach())
            del result  # the graph, which takes memory
        has_drawn = calls.has_drawn or generators != generator_states()
        after = self._sums()  # the representation of NaN is equal to itself
        changed = next((name for name, sums in before.items() if repr(after.get(name)) != repr(sums)), None)
        calls.hides_insides = is_first
        losses.append(forward(whole).detach() if is_first else losses[0])
        known = ([float(each) for each in losses], weights.known()[0]) if self._pipeline.is_last else ([], [])
        return *known, first_nan, has_drawn, changed

    def _sums(self) -> dict[str, list[float]]:
        """Return two sums over each parameter, gradient and buffer that this stage has, by which changes are found."""
        named = [(f"{_BUFFER}{name}", buffer) for name, buffer in self._module.named_buffers()]
        for name, parameter in self._module.named_parameters():
            named.append((f"the parameter {name}", parameter))
            if parameter.grad is not None:
                named.append((f"the gradient of {name}", parameter.grad))
        sums: dict[str, list[float]] = {}
        for name, tensor in named:
            if not (is_elsewhere(tensor) or tensor.is_meta):
                values = local_part(tensor.detach())
                values = torch.view_as_real(values) if values.is_complex() else values
                sums[name] = [float(each.sum(dtype=torch.float64)) for each in (values, values * values)]
        return sums


@contextmanager
def _gradients_of_ones(module: Module) -> Iterator[None]:
    """Give parameters other gradients inside the block, so that a change of them shows."""
    own = [each for each in module.parameters() if each.requires_grad and not is_elsewhere(each)]
    kept = [(each, each.grad) for each in own if not isinstance(each, DTensor)]  # split ones get no plain tensor
    for parameter, _ in kept:
        parameter.grad = torch.ones_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
