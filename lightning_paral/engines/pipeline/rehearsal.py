"""Check before the first training step that dividing the module and its batches does not change the loss."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_paral.data.parts import first_samples, num_samples_of, weighted_mean
from lightning_paral.data.rollback import rollback_side_effects
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.engines.pipeline.dependencies import Dependencies
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.engines.pipeline.step_state import StateOfStep
from lightning_paral.engines.pipeline.streams import Draws
from lightning_paral.engines.pipeline.weights import MicroBatchWeights
from lightning_paral.errors import ConfigurationError

_TOLERANCE = 1e-4
_TOLERANCE_OF_16_BITS = 3e-2

Forward = Callable[[Any, Dependencies | None], Any]
"""Runs the step on a batch; returns its loss on the last stage, and `None` on the others."""


def rehearse(
    module: LightningModule,
    batch: Any,
    forward: Forward,
    groups: PipelineGroups | None,
    dependencies: Dependencies,
    num_samples: int,
) -> None:
    """Run the training step on samples of `batch`, without backward pass. *Collective* over the pipeline.

    Changes of parameters by the step itself remain. There are no other side effects.

    Args:
        module: the LightningModule.
        batch: a training batch.
        forward: runs the step.
        groups: the process groups of the run; `None` if there is one stage.
        dependencies: finds out on which units the tensors of the step depend.
        num_samples: the largest number of samples whose losses are compared, two at a time. If it is 1, because batches
            are not divided, the step runs on the whole batch.

    Raises:
        ConfigurationError: the step uses outputs of a unit in places where its stage does not have them, changes
            parameters or buffers in a way that depends on the stage or on the number of micro-batches, keeps state of a
            sample for the next step, or has a loss of two samples that is not the mean of their losses. Raised on all
            stages.
    """
    two, one, other = (first_samples(batch, start, stop) for start, stop in ((0, 2), (0, 1), (1, 2)))
    divides_batches = num_samples > 1
    whole = two if divides_batches else batch
    failure = None
    state, draws = StateOfStep(module), Draws()
    with rollback_side_effects(module), draws:
        try:
            forward(whole, dependencies)
        except ConfigurationError as error:
            failure = str(error)
        except Exception as error:
            if divides_batches:
                error.add_note(
                    "It failed when paral_pp, which divides batches, ran training_step on two samples of one. If the "
                    "step keeps state of a batch, such as a hidden state, set micro_batches=1, or use paral_fsdp."
                )
            raise
        changed = state.changed()
    check_observed(groups, failure, dependencies.explain())
    if any(_of_all(groups, bool(changed))):
        of_stages = _of_all(groups, state.sums())
        with rollback_side_effects(module):
            for part in (one, other) if divides_batches and other is not None else (whole,):
                forward(part, None)
            failure = state.explain_changed(changed, of_stages, divides_batches=divides_batches)
        check_observed(groups, failure)
    trained = [part for part in module.modules() if part.training]
    if any(_of_all(groups, bool(draws.noted))):  # dropout: compare without it
        module.eval()
    try:
        total = num_samples_of(batch) or 1
        for pair in pairwise(sorted({total * number // num_samples for number in range(num_samples)})):
            _compare(module, batch, *pair, forward, groups)
    finally:
        for part in trained:
            part.training = True


def _compare(
    module: LightningModule, batch: Any, one: int, other: int, forward: Forward, groups: PipelineGroups | None
) -> None:
    """Check that the loss of two samples is the mean of those in two steps. *Collective* over the pipeline."""
    draws, weights, losses = Draws(), MicroBatchWeights([1, 1]), []
    both, *parts = ((one, other + 1, other - one), (one, one + 1), (other, other + 1))
    for passes in ([(None, both)], list(enumerate(parts)), [(1, parts[1])]):
        with rollback_side_effects(module):
            for sample, samples in passes:
                with isolate_rng(), draws.of_sample(sample):
                    losses.append(forward(first_samples(batch, *samples), None))
    values = [float(loss.detach()) for loss in losses if loss is not None]
    for number in range(2 * bool(values)):
        weights.weighted(number, losses[1 + number])
    found = _of_all(groups, (draws.are_repeated, values, weights.known()[0]))
    if not all(are_repeated for are_repeated, _, _ in found):
        return  # the losses are not comparable
    (of_both, first, after, without), known = next(each[1:] for each in found if each[1])
    mean = weighted_mean([first, after], known, torch.device("cpu"))
    step, precision = f"{type(module).__name__}.training_step", module.trainer.precision
    tolerance = _TOLERANCE if "32" in precision or "64" in precision else _TOLERANCE_OF_16_BITS
    if not np.isclose(after, without, tolerance, tolerance, equal_nan=True):
        raise ConfigurationError(
            f"{step} keeps state of a batch for the next step, such as a hidden state in an attribute: the loss of a "
            f"sample is {after:.6g} after a step on another one, and {without:.6g} without that step. A pipeline "
            "divides batches into micro-batches, which would get the state of others. Set micro_batches=1, or train "
            "with paral_fsdp."
        )
    if not np.isclose(of_both, mean, tolerance, tolerance, equal_nan=True):
        raise ConfigurationError(
            f"The loss of {step} is not a mean over samples, nor over the targets of a cross entropy: it is "
            f"{of_both:.6g} for two samples of a batch, but the mean of their losses is {mean:.6g}. A pipeline divides "
            "batches into micro-batches and averages their losses, so it would train differently than one process. Set "
            "micro_batches=1, or train with paral_fsdp. If the difference is intended, set check_steps=False."
        )


def check_observed(groups: PipelineGroups | None, *failures: str | None) -> None:
    """Raise a `ConfigurationError` on all stages if a step that was observed failed. *Collective* over the pipeline.

    Args:
        groups: the process groups of the run; `None` if there is one stage.
        failures: messages of errors of this stage, or `None`, the causes first.
    """
    of_stages = _of_all(groups, failures)
    for of_each_kind in zip(*of_stages, strict=True):
        for message in of_each_kind:
            if message is not None:
                raise ConfigurationError(message)


def _of_all(groups: PipelineGroups | None, value: Any) -> list[Any]:
    return [value] if groups is None else gather_objects(value, groups.values)
