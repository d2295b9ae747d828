"""The user's optimizer as DeepSpeed can take it: one, with groups that train something, offloadable where wanted."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import LBFGS, Optimizer

from lightning_paral.compat.deepspeed.processor import processor_read_once
from lightning_paral.compat.lightning.optimizers import is_none
from lightning_paral.engines.zero.offload.operators import load_operator
from lightning_paral.engines.zero.optimizer.elementwise import check_elementwise
from lightning_paral.engines.zero.optimizer.twin import UsersOptimizer, twin_of
from lightning_paral.errors import ConfigurationError

_OFFLOADABLE = (
    "torch.optim.Adam, torch.optim.AdamW, deepspeed.ops.adam.DeepSpeedCPUAdam and deepspeed.ops.lion.DeepSpeedCPULion"
)


def check_kind(optimizers: list[Any], module: LightningModule) -> list[Optimizer] | None:
    """Return the optimizers, all of which ZeRO can partition; `None` if `configure_optimizers` returned `None`.

    Raises:
        ConfigurationError: `configure_optimizers` returned an empty list, or an optimizer that ZeRO cannot partition.
    """
    name = type(module).__name__
    if len(optimizers) == 1 and is_none(optimizers[0]):
        return None
    if not optimizers:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned a list without an optimizer. Return an optimizer, or None to run "
            "without one."
        )
    others = [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, Optimizer)]
    if others:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {others[0]}, which is not a torch.optim.Optimizer. "
            "ZeRO divides the state of one: return one, or train with paral_ddp."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigurationError("LBFGS needs several backward passes per step, which ZeRO cannot do.")
    return optimizers


def engines_optimizer(users: UsersOptimizer, *, offload: bool, trust: bool) -> Optimizer:
    """Return the optimizer that DeepSpeed gets, which shares nothing with the user's but parameters.

    Args:
        users: the user's.
        offload: whether it runs on the host: then it is `DeepSpeedCPUAdam` with the hyper-parameters of an Adam.
        trust: whether an optimizer passes that may not be elementwise.

    Raises:
        ConfigurationError: an optimizer, or an option of it, that ZeRO or its offload cannot take; nothing to train.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    optimizer: Any = users.optimizer
    if type(optimizer) in (DeepSpeedCPUAdam, DeepSpeedCPULion):
        options = {"fp32_optimizer_states": optimizer.fp32_optimizer_states}
        if type(optimizer) is DeepSpeedCPUAdam:
            options["adamw_mode"] = optimizer.adam_w_mode
        with processor_read_once():
            anew: Optimizer = type(optimizer)(users.busy_groups(), **options)
        return anew
    if offload:
        return _offloaded(optimizer, users.busy_groups())
    if not trust:
        check_elementwise(optimizer)
    return twin_of(optimizer, users.busy_groups())


def _offloaded(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return `DeepSpeedCPUAdam` over `groups` with the hyper-parameters of `optimizer`."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"{kind} cannot be offloaded. Those that can: {_OFFLOADABLE}. Choose one of them, or leave out "
            "offload_optimizer."
        )
    for option in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(option) for group in groups):
            raise ConfigurationError(f"{kind}({option}=True) cannot be offloaded: DeepSpeedCPUAdam has no {option}.")
    decoupled = {_is_decoupled(optimizer, group) for group in groups}
    if len(decoupled) > 1:
        raise ConfigurationError(
            "DeepSpeedCPUAdam decouples the weight decay of all parameter groups (AdamW) or of none (Adam), but "
            "decoupled_weight_decay differs between groups."
        )
    for group in groups:
        group["lr"] = float(group["lr"])  # torch takes tensors, too
        group["betas"] = tuple(float(beta) for beta in group["betas"])
    load_operator("cpu_adam", "offload_optimizer")
    with processor_read_once():
        replacement: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=decoupled.pop())
    first, *others = groups
    rank_zero_info(
        f"Offload: {kind} was replaced by DeepSpeedCPUAdam with the same lr={first['lr']:g}, betas={first['betas']}, "
        f"eps={first['eps']:g}, weight_decay={first['weight_decay']:g}, {len(others)} further groups likewise."
    )
    return replacement


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
