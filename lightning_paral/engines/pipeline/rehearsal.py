"""Check before the first training step that dividing the module and its batches does not change the loss."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.data.padding import rollback_side_effects
from lightning_paral.data.parts.split import first_samples
from lightning_paral.distributed.host_exchange import gather_objects
from lightning_paral.engines.pipeline.dependencies import Dependencies
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.engines.pipeline.step_state import StateOfStep
from lightning_paral.engines.pipeline.streams import RandomStreams
from lightning_paral.errors import ConfigurationError

_TOLERANCE = 1e-4
_TOLERANCE_OF_16_BITS = 3e-2

Forward = Callable[[Any, Dependencies | None], Tensor | None]
"""Runs the step on a batch; returns its loss on the last stage, and `None` on the others."""


def rehearse(
    module: LightningModule,
    batch: Any,
    forward: Forward,
    groups: PipelineGroups | None,
    streams: RandomStreams,
    dependencies: Dependencies,
    *,
    divides_batches: bool,
) -> None:
    """Run the training step on the first two samples of `batch`, without backward pass. *Collective* over the pipeline.

    Changes of parameters by the step itself remain. There are no other side effects.

    Args:
        module: the LightningModule.
        batch: the first training batch.
        forward: runs the step.
        groups: the process groups of the run; `None` if there is one stage.
        streams: the random numbers of the passes.
        dependencies: finds out on which units the tensors of the step depend.
        divides_batches: whether batches are divided into micro-batches.

    Raises:
        ConfigurationError: the step uses outputs of a unit in places where its stage does not have them, changes
            parameters or buffers in a way that depends on the stage or on the number of micro-batches, or has a loss of
            two samples that is not the mean of their losses. Raised on all stages.
    """
    two, one, other = (first_samples(batch, start, stop) for start, stop in ((0, 2), (0, 1), (1, 2)))
    failure = None
    state = StateOfStep(module)
    with rollback_side_effects(module), streams.watching() as have_drawn:
        try:
            forward(two, dependencies)
        except ConfigurationError as error:
            failure = str(error)
        draws = have_drawn()
        buffers, parameters = state.changed_buffers(), state.changed_parameters()
    check_observed(groups, failure, dependencies.explain())
    if any(_of_all(groups, bool(buffers or parameters))):
        of_stages = _of_all(groups, state.sums())
        with rollback_side_effects(module):
            for part in (one, other) if divides_batches and other is not None else (two,):
                forward(part, None)
            of_buffers = state.explain_differing_buffers(buffers) if divides_batches else None
            of_parameters = state.explain_differing_parameters(parameters, of_stages)
        check_observed(groups, of_buffers, of_parameters)
    if not divides_batches or other is None:
        return
    draws = any(_of_all(groups, draws))
    trained = [part for part in module.modules() if part.training]
    if draws:  # dropout: compare without it
        module.eval()
    try:
        with rollback_side_effects(module), streams.watching() as have_drawn:
            losses = [forward(each, None) for each in (two, one, other)]
            draws = have_drawn()
    finally:
        for part in trained:
            part.training = True
    if any(_of_all(groups, draws)):
        return  # the losses are not comparable
    values = next(each for each in _of_all(groups, _floats(losses)) if each is not None)
    of_two, mean = values[0], (values[1] + values[2]) / 2
    tolerance = (
        _TOLERANCE if "32" in module.trainer.precision or "64" in module.trainer.precision else _TOLERANCE_OF_16_BITS
    )
    if abs(of_two - mean) > tolerance * max(1.0, abs(of_two)):
        raise ConfigurationError(
            f"The loss of {type(module).__name__}.training_step is not a mean over samples: it is {of_two:.6g} for the "
            f"first two samples of the first batch, but the mean of their losses is {mean:.6g}. A pipeline divides "
            "batches into micro-batches and averages their losses, so it would train differently than one process. "
            "Set micro_batches=1, return a mean over samples, or train with paral_fsdp. If the difference is intended, "
            "for example a mean over tokens, set check_steps=False."
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


def _floats(losses: list[Tensor | None]) -> list[float] | None:
    return None if any(loss is None for loss in losses) else [float(loss) for loss in losses if loss is not None]
