"""What hooks read: gradients, values and optimizer state, by a strategy's readers, or in one process as they are."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def read_values(
    strategy: Any, parameters: dict[str, Parameter], optimizer: Any, *, with_state: bool
) -> dict[str, Tensor]:
    """Return gradients, values and the gradient norm of `parameters`, and if `with_state` Adam's moments and steps."""
    found: dict[str, Tensor] = {}
    has_readers = hasattr(strategy, "full_gradient")
    for name, parameter in parameters.items():
        if has_readers:
            found |= {name: strategy.full_gradient(parameter), f"{name} value": strategy.full_parameter(parameter)}
        else:
            found |= {name: parameter.grad, f"{name} value": parameter}  # type: ignore[dict-item]
        for key in ("exp_avg", "step") if with_state else ():
            read = strategy.full_optimizer_state if has_readers else lambda p, key: optimizer.state[p][key]
            found[f"{name} {key}"] = read(parameter, key)
    if has_readers:
        found["norm"] = strategy.gradient_norm(optimizer)
    else:
        found["norm"] = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])  # type: ignore[misc]
    return {name: value.detach().clone() for name, value in found.items()}
