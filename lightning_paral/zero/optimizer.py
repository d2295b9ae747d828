"""The user's optimizer as DeepSpeed can take it: one, with groups that train something, offloadable where wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import LBFGS, Optimizer

from lightning_paral.errors import ConfigurationError

_OFFLOADABLE = (
    "torch.optim.Adam, torch.optim.AdamW, deepspeed.ops.adam.DeepSpeedCPUAdam and deepspeed.ops.lion.DeepSpeedCPULion"
)


def check_one(optimizers: list[Any], module: LightningModule) -> Optimizer:
    """Return the only optimizer.

    Raises:
        ConfigurationError: there is none, there are several, or it is one that ZeRO cannot partition.
    """
    name = type(module).__name__
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {len(optimizers)} optimizers, and ZeRO partitions one. Merge them "
            "into one optimizer with a parameter group each, or choose paral_ddp."
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{name}.configure_optimizers returned no optimizer, but training under ZeRO is the partitioning of one. "
            "Return an optimizer, or use trainer.validate, test or predict."
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError("LBFGS needs several backward passes per step, which ZeRO cannot do.")
    return optimizer


def without_idle_groups(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer`, or a twin of it without the groups in which no parameter is trained.

    DeepSpeed drops empty groups from the optimizer itself; a scheduler would then find fewer groups than it was made
    for. The twin shares the other groups and the state, and the scheduler keeps the original.

    Raises:
        ConfigurationError: no group is left.
    """
    busy = [group for group in optimizer.param_groups if any(parameter.requires_grad for parameter in group["params"])]
    if not busy:
        raise ConfigurationError("No parameter of the optimizer requires a gradient: there is nothing to train.")
    if len(busy) == len(optimizer.param_groups):
        return optimizer
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = busy
    return twin


def offloadable(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` if DeepSpeed can run it on the host, else `DeepSpeedCPUAdam` with its hyper-parameters.

    The new optimizer shares the parameter groups, so that schedulers made for the old one set its learning rates.

    Raises:
        ConfigurationError: an optimizer, or an option of it, that has no counterpart on the host.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    if type(optimizer) in (DeepSpeedCPUAdam, DeepSpeedCPULion):
        return optimizer
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"{kind} cannot be offloaded. Those that can: {_OFFLOADABLE}. Choose one of them, or leave out "
            "offload_optimizer."
        )
    for option in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ConfigurationError(f"{kind}({option}=True) cannot be offloaded: DeepSpeedCPUAdam has no {option}.")
    decoupled = {_is_decoupled(optimizer, group) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise ConfigurationError(
            "DeepSpeedCPUAdam decouples the weight decay of all parameter groups (AdamW) or of none (Adam), but "
            "decoupled_weight_decay differs between groups."
        )
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])  # torch takes tensors, too
        group["betas"] = tuple(float(beta) for beta in group["betas"])
    with _cpu_info_read_once():
        replacement: Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled.pop())
    first, *others = optimizer.param_groups
    rank_zero_info(
        f"Offload: {kind} was replaced by DeepSpeedCPUAdam with the same lr={first['lr']:g}, betas={first['betas']}, "
        f"eps={first['eps']:g}, weight_decay={first['weight_decay']:g}, {len(others)} further groups likewise."
    )
    return replacement


@contextmanager
def _cpu_info_read_once() -> Iterator[None]:
    # DeepSpeedCPUAdam asks for the processor's vendor each time, which starts a process and takes a second.
    import cpuinfo

    read = cpuinfo.get_cpu_info
    cpuinfo.get_cpu_info = _cpu_info
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = read


@cache
def _cpu_info() -> Any:
    from cpuinfo.cpuinfo import get_cpu_info

    return get_cpu_info()


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
