"""Try steps of an optimizer on small tensors."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.torch import optimizers


def foreign_attribute(optimizer: Optimizer) -> str | None:
    """Return an attribute through which `optimizer` could change tensors outside of a trial, or `None`."""
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        values: Iterable[Any] = value.values() if isinstance(value, dict) else value if _is_list(value) else (value,)
        if any(isinstance(each, Optimizer | Module | Parameter) for each in values):
            return name
    return None


def run_trial(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Iterable[Sequence[Tensor]],
    arguments: Callable[[], Mapping[str, Any]],
) -> list[Tensor]:
    """Return `values` after a copy of `optimizer`, with the options of `group`, has stepped with all `gradients`.

    The parameters, state and groups of `optimizer` do not change.

    Args:
        optimizer: an optimizer without a `foreign_attribute`.
        group: one of its parameter groups.
        values: the values of the parameters, on the CPU.
        gradients: for each step, the gradients of the parameters.
        arguments: returns keyword arguments for a step.
    """
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    parameters = [Parameter(each.clone()) for each in values]
    is_lr_zero = not isinstance(group.get("lr", True), Tensor) and group.get("lr", True) == 0
    lr = {"lr": 0.01} if is_lr_zero else {}  # a warmup may start at 0, where steps change nothing
    trial.__dict__.update(param_groups=[{**group, **lr, "params": parameters}], state=defaultdict(dict))
    trial.__dict__.update(optimizers.no_hooks())
    if isinstance(optimizer, torch.optim.Adagrad):  # only this optimizer creates its state in its constructor
        for parameter in parameters:
            trial.state[parameter] = {
                "step": torch.tensor(0.0),
                "sum": torch.full_like(parameter, group["initial_accumulator_value"], requires_grad=False),
            }
    with torch.random.fork_rng(devices=[]):
        for step_gradients in gradients:
            for parameter, gradient in zip(parameters, step_gradients, strict=True):
                parameter.grad = gradient.clone()
            torch.manual_seed(0)
            trial.step(**arguments())
    return [parameter.detach() for parameter in parameters]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | set)
