"""Check that an optimizer updates each parameter on its own, because a stage has the gradients of some of them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_paral.errors import ConfigurationError
from lightning_paral.model.optimizer_trial import foreign_attribute, run_trial

_NUM_STEPS = 4
_SHAPES = ((6, 5), (7,))
_TOLERANCE = 1e-5


def check_separable(optimizer: Optimizer) -> None:
    """Raise a `ConfigurationError` if an update of a parameter depends on others, such as by a norm over all of them.

    In a trial, a copy of the optimizer steps with two small tensors together, and with each alone. Optimizers of torch
    are not tried: they update each parameter on its own, or fail on parameters of other stages.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    obstacle = foreign_attribute(optimizer)
    try:
        difference = 0.0 if obstacle else max(_difference(optimizer, group) for group in optimizer.param_groups)
    except Exception as error:
        obstacle, difference = f"{type(error).__name__}: {error}", 0.0
    if obstacle is not None:
        rank_zero_warn(
            f"{name} could not be tried on small tensors ({obstacle}). In a pipeline, its steps have the gradients of "
            "one stage. If they combine parameters, such as in a norm over all of them, train with paral_fsdp."
        )
    elif difference > _TOLERANCE:
        raise ConfigurationError(
            f"{name} combines parameters: in a trial of {_NUM_STEPS} steps, two parameters got other values together "
            f"than alone (relative difference {difference:.1e}). In a pipeline, its steps have the gradients of one "
            "stage, so it would train differently than in one process. Choose an optimizer that updates each parameter "
            "on its own (SGD, Adam, AdamW, ...), or train with paral_ddp."
        )


def _difference(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return how far the steps with both tensors and with each differ, relative to the largest change of an element."""
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients = [
        [scale * torch.randn(shape, generator=generator) for scale, shape in zip((1.0, 10.0), _SHAPES, strict=True)]
        for _ in range(_NUM_STEPS)
    ]
    takes_closure = "closure" in inspect.signature(type(optimizer).step).parameters

    def arguments() -> Mapping[str, Any]:
        return {"closure": lambda: torch.ones(())} if takes_closure else {}

    together = run_trial(optimizer, group, first, gradients, arguments)
    largest = 0.0
    for number, both in enumerate(together):
        of_one = [[each[number]] for each in gradients]
        (alone,) = run_trial(optimizer, group, [first[number]], of_one, arguments)
        change = (both - first[number]).abs().max().clamp(min=1e-12)
        largest = max(largest, float((both - alone).abs().max() / change))
    return largest
