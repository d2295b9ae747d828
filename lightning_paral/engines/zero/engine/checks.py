"""Check that DeepSpeed can train the parameters of a module by the optimizers it is given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.engines.zero.options import ZeROOptions
from lightning_paral.engines.zero.parameters.partition import check_not_empty
from lightning_paral.engines.zero.training.users_optimizer import UsersOptimizer
from lightning_paral.errors import ConfigurationError

_PRECISIONS = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
_LOW = {torch.float16, torch.bfloat16}


def check_parameters(module: Module, trained: list[Any], config: dict[str, Any]) -> None:
    """Raise a `ConfigurationError` for parameters that DeepSpeed cannot shard or train, or would convert."""
    if config["zero_optimization"]["stage"] == 3:
        check_not_empty(module)
    low = any(config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
    partitioned = config["zero_optimization"]["stage"] == 3
    kept = set(trained)
    first = next(module.parameters(), None)
    for name, parameter in module.named_parameters():
        if parameter in kept:
            if parameter.dtype not in (_LOW if low else {torch.float32}):
                precision = None if low else _PRECISIONS.get(parameter.dtype)
                instead = f"Train with Trainer(precision={precision!r})" if precision else "Convert the parameter"
                raise ConfigurationError(
                    f"{name} is of {_short(parameter.dtype)}, which ZeRO cannot train at this precision: it takes "
                    f"{'bfloat16 or float16' if low else 'float32'}. {instead}, freeze it, or use paral_ddp."
                )
        elif (
            partitioned
            and parameter.dtype not in _LOW | {torch.float32}
            # DeepSpeed 0.19.8 assumes that all have the dtype of the first one.
            and (parameter.is_floating_point() or parameter is first)
        ):
            raise ConfigurationError(
                f"{name} is of {_short(parameter.dtype)}, which ZeRO stage 3 cannot shard. Convert the parameter, "
                "make it a buffer, or use paral_zero2 or paral_ddp."
            )


def check_first_dtype(module: Module, optimizer: Optimizer, trained: list[Any], stage: int) -> None:
    """Raise a `ConfigurationError` if stage 2 would reduce gradients in the dtype of a frozen parameter.

    DeepSpeed 0.19.8 assumes that all gradients have the dtype of the optimizer's first parameter.
    """
    first = optimizer.param_groups[0]["params"][0]
    dtypes = {parameter.dtype for parameter in trained if parameter.requires_grad}
    if stage == 2 and not first.requires_grad and dtypes and first.dtype not in dtypes:
        name = next((name for name, parameter in module.named_parameters() if parameter is first), "a parameter")
        raise ConfigurationError(
            f"The first parameter of {type(optimizer).__name__}, {name}, is frozen and of {_short(first.dtype)}: ZeRO "
            f"stage 2 would exchange all gradients in that dtype instead of {_short(min(dtypes, key=str))}. Give the "
            "optimizer only what is trained: (p for p in self.parameters() if p.requires_grad)."
        )


def check_several(optimizers: Sequence[UsersOptimizer], options: ZeROOptions, precision: str) -> None:
    """Check that each of several optimizers can have an engine of its own.

    Raises:
        ConfigurationError: a parameter is in two of them; something is on NVMe; the precision is fp16 weights.
    """
    owners: dict[str, int] = {}
    for number, users in enumerate(optimizers):
        for name in (name for of_group in users.names for name in of_group):
            if owners.setdefault(name, number) != number:
                raise ConfigurationError(
                    f"{name!r} is in optimizers {owners[name]} and {number} of configure_optimizers. ZeRO shards the "
                    "state of an optimizer together with its parameters. Give each parameter to one "
                    "optimizer, or train with paral_ddp or paral_fsdp."
                )
    if options.on_nvme:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and {', '.join(options.on_nvme)} is on NVMe, "
            'which is possible with one optimizer only. Offload to "cpu", or return one optimizer with a parameter '
            "group each."
        )
    if precision == "16-true":
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and with fp16 weights DeepSpeed would scale "
            'the loss differently for each. Use Trainer(precision="bf16-true") or "16-mixed", or return one optimizer.'
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
