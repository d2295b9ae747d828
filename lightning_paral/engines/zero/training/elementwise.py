"""Check that an optimizer is elementwise, because ZeRO gives it flat tensors that are cut at any element.

The check is a trial: the optimizer steps on a small matrix and a vector, and on the same elements flattened and cut. It
must compute the same values both times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.engines.zero.training.step_arguments import closure_arguments
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.optimizer_trial import foreign_attribute, run_trial

_NUM_STEPS = 4
_ROWS, _COLUMNS, _LENGTH = 6, 5, 7
_CUTS = (11, 17)
_TOLERANCE = 1e-5


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise a `ConfigurationError` unless `optimizer` updates every element of a parameter independently.

    A copy of the optimizer runs on small tensors. The parameters, state and groups of the original do not change.
    """
    class_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    remedy = (
        "Train with paral_ddp, which gives optimizers full parameters, or choose an elementwise optimizer (SGD, Adam, "
        "AdamW, RMSprop, Adagrad, ...). If you know that it is elementwise, set "
        "ParalZeROStrategy(trust_optimizer=True)."
    )
    attribute = foreign_attribute(optimizer)
    if attribute is not None:
        raise ConfigurationError(
            f"{class_name} refers to another optimizer, a module or parameters in its attribute {attribute!r}. ZeRO "
            "shards the elements of all parameters over the ranks. No trial can tell whether steps of this optimizer "
            f"stay correct. {remedy}"
        )
    try:
        difference = max(_difference(optimizer, group) for group in optimizer.param_groups)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{class_name} cannot step on flat tensors ({type(error).__name__}: {error}). ZeRO gives optimizers only "
            f"flat tensors, because it shards the elements of all parameters over the ranks. {remedy}"
        ) from error
    if not difference <= _TOLERANCE:
        raise ConfigurationError(
            f"{class_name} is not elementwise: in a trial of {_NUM_STEPS} steps, flattened parts of a parameter got "
            f"other values than the full parameter (relative difference {difference:.1e}). ZeRO shards the elements of "
            f"all parameters over the ranks, and would train a different model. {remedy}"
        )


def _difference(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return how far the steps of the trial differ, relative to the largest change of an element."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((_ROWS, _COLUMNS), (_LENGTH,))
    first = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(_NUM_STEPS)]

    def arguments() -> dict[str, Any]:
        return closure_arguments(optimizer, torch.ones(()))

    full = run_trial(optimizer, group, first, gradients, arguments)
    cut_gradients = [_flatten_and_cut(tensors) for tensors in gradients]
    cut = run_trial(optimizer, group, _flatten_and_cut(first), cut_gradients, arguments)
    flat_full, flat_cut = (torch.cat([values.reshape(-1) for values in result]) for result in (full, cut))
    change = (flat_full - torch.cat(_flatten_and_cut(first))).abs().max()
    if not torch.isfinite(flat_full).all() or not change:
        return torch.inf
    return float((flat_full - flat_cut).abs().max() / change)


def _flatten_and_cut(tensors: list[Tensor]) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return list(torch.tensor_split(flat, _CUTS))
