"""Check that DeepSpeed can shard the parameters of a module and train them with the given optimizers."""

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
    """Raise a `ConfigurationError` for a parameter that DeepSpeed cannot shard or train, or would convert.

    Args:
        module: the module that is sharded.
        trained: the parameters that an engine trains.
        config: DeepSpeed's configuration.
    """
    if config["zero_optimization"]["stage"] == 3:
        check_not_empty(module)
    low = any(config.get(section, {}).get("enabled") for section in ("bf16", "fp16"))
    partitioned = config["zero_optimization"]["stage"] == 3
    trained_set = set(trained)
    first = next(module.parameters(), None)
    for name, parameter in module.named_parameters():
        if parameter in trained_set:
            if parameter.dtype not in (_LOW if low else {torch.float32}):
                precision = None if low else _PRECISIONS.get(parameter.dtype)
                instead = f"Train with Trainer(precision={precision!r})" if precision else "Convert the parameter"
                raise ConfigurationError(
                    f"{name} has dtype {_short(parameter.dtype)}, which ZeRO cannot train at this precision: it trains "
                    f"{'bfloat16 or float16' if low else 'float32'} only. {instead}, freeze it, or use paral_ddp."
                )
        elif (
            partitioned
            and parameter.dtype not in _LOW | {torch.float32}
            # DeepSpeed 0.19.8 assumes that all parameters have the dtype of the first one.
            and (parameter.is_floating_point() or parameter is first)
        ):
            raise ConfigurationError(
                f"{name} has dtype {_short(parameter.dtype)}, which ZeRO stage 3 cannot shard. Convert the parameter, "
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
            f"The first parameter of {type(optimizer).__name__}, {name}, is frozen and has dtype "
            f"{_short(first.dtype)}: ZeRO stage 2 would reduce all gradients in that dtype instead of "
            f"{_short(min(dtypes, key=str))}. Give the optimizer only parameters that are trained: (p for p in "
            "self.parameters() if p.requires_grad)."
        )


def check_several(optimizers: Sequence[UsersOptimizer], options: ZeROOptions, precision: str) -> None:
    """Check that each of several optimizers can have its own engine.

    Raises:
        ConfigurationError: a parameter is in two optimizers, something is offloaded to NVMe, or weights are fp16.
    """
    owners: dict[str, int] = {}
    for number, users in enumerate(optimizers):
        for name in (name for group_names in users.names for name in group_names):
            if owners.setdefault(name, number) != number:
                raise ConfigurationError(
                    f"{name!r} is in optimizers {owners[name]} and {number} of configure_optimizers. ZeRO shards the "
                    "state of an optimizer together with its parameters. Give each parameter to only one optimizer, or "
                    "train with paral_ddp or paral_fsdp."
                )
    if options.on_nvme:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but {', '.join(options.on_nvme)} to NVMe "
            'supports only one. Offload to "cpu", or return one optimizer with several parameter groups.'
        )
    if precision == "16-true":
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but with fp16 weights DeepSpeed would scale "
            'the loss differently for each. Use Trainer(precision="bf16-true") or "16-mixed", or return one optimizer.'
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
