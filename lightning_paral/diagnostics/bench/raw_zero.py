"""A training step as a hand-written DeepSpeed loop, with the configuration of the `paral_zero` strategies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.engines.zero.runtime import config as settings
from lightning_paral.engines.zero.runtime import deepspeed as runtime

RAW_ZERO = {f"raw_zero{stage}": stage for stage in (1, 2, 3)}
"""The stage, by the name of the loop."""


def building_in_shards(device: torch.device, world_size: int) -> AbstractContextManager[Any]:
    """Return a block in which DeepSpeed's stage 3 shards every module that is created. *Collective* over all ranks."""
    runtime.join_deepspeed(level=40, device=device)
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.Init(
        config_dict_or_path=_config(3, 2**62, world_size, device)
    )
    return context


def make_zero_step(
    name: str, module: Module, optimizer: Optimizer, *, clip: float, world_size: int, device: torch.device
) -> Callable[[Any, int], None]:
    """Return a function that trains `module` with a batch and its number. *Collective* over all ranks.

    Args:
        name: a name from `RAW_ZERO`.
        module: a module in fp32 whose forward pass takes a batch and its number, and returns the loss.
        optimizer: its optimizer.
        clip: the largest norm of the gradients; 0 for any.
        world_size: the number of ranks.
        device: the device of this rank.
    """
    runtime.join_deepspeed(level=40, device=device)
    import deepspeed

    # At stage 3, a parameter that was built in shards has no elements of its own.
    num_elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
    config = _config(RAW_ZERO[name], num_elements, world_size, device) | {"gradient_clipping": clip}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: Any, number: int) -> None:
        output = engine(batch, number)
        engine.backward(output["loss"] if isinstance(output, dict) else output)
        engine.step()

    return step


def _config(stage: int, num_elements: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a module of so many elements."""
    config = settings.complete({"zero_optimization": {"stage": stage}}, {})
    section = settings.add_device_defaults(
        config["zero_optimization"], stage, num_elements, device_type=device.type, num_ranks=world_size
    )
    return config | {"zero_optimization": section}
