"""Several optimizers under ZeRO: an engine for each, around its own parameters, and one forward for all.

DeepSpeed's engine takes a module and one optimizer, and at stage 3 hangs hooks on the module that gather its parameters
(DeepSpeed#1229). So each optimizer's engine is given a module that does nothing but hold the optimizer's parameters.
The module that is trained has no engine at stages 1 and 2, and at stage 3 one that only gathers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.deepspeed.coordinator import share_coordinator
from lightning_paral.compat.deepspeed.forward_stack import leave_out_of_forwards
from lightning_paral.engines.zero.config.options import ZeROOptions
from lightning_paral.engines.zero.engine.build import build_inference_engine, build_training_engine, check_parameters
from lightning_paral.engines.zero.optimizer.accepted import engines_optimizer
from lightning_paral.engines.zero.optimizer.twin import UsersOptimizer
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import shared_buffers


class _Holder(Module):
    """The parameters of one optimizer that are trained."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"parameter_{number}", parameter)


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
                    f"{name!r} is in optimizers {owners[name]} and {number} of configure_optimizers. ZeRO divides the "
                    "state of an optimizer along with its parameters, which belong to one. Give each parameter to one "
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


def build_engines(
    module: Module,
    optimizers: Sequence[UsersOptimizer],
    sized_config: Callable[[Module], dict[str, Any]],
    device: torch.device,
    *,
    offload: bool,
    trust: bool,
) -> tuple[Any, list[Any]]:
    """Return what the steps of `module` run through, and an engine for each optimizer. *Collective* over the world.

    Args:
        module: whose parameters the optimizers have.
        optimizers: the user's, over different parameters.
        sized_config: returns DeepSpeed's configuration for a module, by the size of what is trained.
        device: of this rank.
        offload: whether optimizers run on the host.
        trust: whether optimizers pass that may not be elementwise.
    """
    config = sized_config(module)
    partitioned = config["zero_optimization"]["stage"] == 3
    trained = [[p for group in users.groups for p in group["params"] if p.requires_grad] for users in optimizers]
    check_parameters(module, [parameter for of_one in trained for parameter in of_one], config)
    inner = [engines_optimizer(users, offload=offload, trust=trust) for users in optimizers]
    if partitioned:
        forward: Any = build_inference_engine(module, config, device)
    else:
        forward = module.to(device)
        broadcast([*module.parameters(), *shared_buffers(module)])
    engines = []
    for parameters, optimizer in zip(trained, inner, strict=True):
        holder = _Holder(parameters)
        engine = build_training_engine(holder, optimizer, sized_config(holder), device)
        if partitioned:
            share_coordinator(forward, engine)
            leave_out_of_forwards(holder)
        engines.append(engine)
    return forward, engines


def drop_gradients_of_others(module: Module, optimizers: Sequence[UsersOptimizer]) -> list[Any]:
    """Drop gradients of parameters that no optimizer has, as they arrive; return the handles of the hooks that do."""
    owned = {id(p) for users in optimizers for group in users.groups for p in group["params"]}

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    return [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in owned
    ]
