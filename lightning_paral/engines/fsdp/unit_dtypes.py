"""Check that the parameters of each unit can be gathered, and their gradients reduced, together."""

from typing import Any

import torch

from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Unit


def check_dtypes(unit: Unit, names: dict[Any, str]) -> None:
    """Raise a `ConfigurationError` if the trained parameters of `unit`, which have `names`, have different dtypes."""
    trained: dict[torch.dtype, str] = {}
    for parameter in unit.parameters:
        if parameter.requires_grad and parameter.dim() > 0 and parameter.numel() > 0:
            trained.setdefault(parameter.dtype, names[parameter])
    if len(trained) > 1:
        found = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in trained.items())
        raise ConfigurationError(
            f"Trained parameters of one unit must have the same dtype, but in {unit.name or 'the root'} there are "
            f"{found}. Convert them, or choose units=[...] so that they are in different units."
        )
