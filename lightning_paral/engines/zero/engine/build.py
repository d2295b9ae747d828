"""Build DeepSpeed's engines around a module: one that trains, one that only gathers parameters, or one per optimizer.

DeepSpeed's engine takes a module and one optimizer, and at stage 3 adds hooks to the module that gather its parameters
(DeepSpeed#1229). So each of several optimizers gets an engine around a module that only holds its parameters. The
module that is trained has no engine at stages 1 and 2 then, and one that only gathers at stage 3.
"""

import argparse
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.checks import check_instance
from lightning_paral.compat.deepspeed.masters import link_round_robin_masters, relink_masters
from lightning_paral.compat.deepspeed.overlap import overlaps, reduce_skipped_by_hooks
from lightning_paral.compat.deepspeed.weight_dtype import keep_given_dtype
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.zero.engine.checks import check_first_dtype, check_parameters
from lightning_paral.engines.zero.engine.hooks import allow_any_output
from lightning_paral.engines.zero.parameters.partition import make_contiguous, scalars_as_bytes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.deepspeed.coordinator import share_coordinator
from lightning_paral.compat.deepspeed.forward_stack import remove_from_forwards
from lightning_paral.engines.zero.training.users_optimizer import UsersOptimizer, engines_optimizer
from lightning_paral.model.buffers import buffers_to_broadcast


def build_training_engine(
    module: Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device
) -> "DeepSpeedEngine":
    """Shard `optimizer`, and by stage gradients and parameters of `module`. *Collective* over the world.

    Schedulers stay with Lightning: they set learning rates in the parameter groups of the user's optimizer.
    """
    engine = _initialize(module, config, device, optimizer, trained_of(module))
    inner: Any = engine.optimizer.optimizer
    if inner is not optimizer:
        # DeepSpeed 0.19.8 replaces Adagrad by one with default options and without groups.
        inner.param_groups = optimizer.param_groups
        if engine.zero_optimization_stage() < 3:
            relink_masters(engine.optimizer)
    if engine.zero_optimization_stage() < 3:
        link_round_robin_masters(engine.optimizer)
    if engine.zero_optimization_stage() == 1 and overlaps(engine.optimizer):
        reduce_skipped_by_hooks(engine.optimizer)
    return engine


def trained_of(module: Module) -> list[Parameter]:
    """Return the parameters of `module` that an engine trains."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def build_inference_engine(module: Module, config: dict[str, Any], device: torch.device) -> "DeepSpeedEngine":
    """Partition the parameters of `module` at stage 3, and gather them while they are used. *Collective*."""
    zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_optimizer"}
    return _initialize(module, config | {"zero_optimization": zero}, device, None, [])


def destroy(engine: Any) -> None:
    """Make `engine` release its module now, and not a second time when it is garbage-collected.

    `DeepSpeedEngine.__del__` of 0.19.8 calls `destroy` again. By then another engine may use the parameters, and would
    lose what it has set on them.
    """
    engine.destroy()
    vars(engine)["destroy"] = lambda: None


def _initialize(
    module: Module, config: dict[str, Any], device: torch.device, optimizer: Optimizer | None, parameters: list[Any]
) -> "DeepSpeedEngine":
    import deepspeed

    check_parameters(module, parameters, config)
    if optimizer is not None:
        check_first_dtype(module, optimizer, parameters, config["zero_optimization"]["stage"])
    for parameter in module.parameters():
        make_contiguous(parameter)
    with scalars_as_bytes(), keep_given_dtype():
        engine, _, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=device.index),
            config=config,
            model=module,
            model_parameters=parameters,
            optimizer=optimizer,
            dist_init_required=False,
        )
    for part in (engine, engine.optimizer, own_parameters(module)):
        check_instance("deepspeed", part)
    if config["zero_optimization"]["stage"] == 3:
        allow_any_output(module)
    for change in (Module.train, Module.eval):  # DeepSpeed 0.19.8 leaves the engine's own `training` as it was
        setattr(engine, change.__name__, MethodType(change, engine))
    engine.training = module.training
    return engine


class _Holder(Module):
    """Holds the trained parameters of one optimizer, and does nothing."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"parameter_{number}", parameter)


def build_engines(
    module: Module,
    optimizers: Sequence[UsersOptimizer],
    sized_config: Callable[[Module], dict[str, Any]],
    device: torch.device,
    *,
    offload: bool,
    trust: bool,
) -> tuple[Any, list[Any]]:
    """Build an engine for each optimizer; return also what steps of `module` run through. *Collective*.

    Args:
        module: whose parameters the optimizers have.
        optimizers: the user's, over different parameters.
        sized_config: returns DeepSpeed's configuration for a module, by the size of what is trained.
        device: of this rank.
        offload: whether optimizers run on the host.
        trust: whether to skip the check that optimizers are elementwise.
    """
    config = sized_config(module)
    is_partitioned = config["zero_optimization"]["stage"] == 3
    trained = [[p for group in users.groups for p in group["params"] if p.requires_grad] for users in optimizers]
    check_parameters(module, [parameter for of_one in trained for parameter in of_one], config)
    inner = [engines_optimizer(users, offload=offload, trust=trust) for users in optimizers]
    if is_partitioned:
        forward: Any = build_inference_engine(module, config, device)
    else:
        forward = module.to(device)
        broadcast([*module.parameters(), *buffers_to_broadcast(module)])
    engines = []
    for parameters, optimizer in zip(trained, inner, strict=True):
        holder = _Holder(parameters)
        engine = build_training_engine(holder, optimizer, sized_config(holder), device)
        if is_partitioned:
            share_coordinator(forward, engine)
            remove_from_forwards(holder)
        engines.append(engine)
    return forward, engines


def drop_gradients_of_others(module: Module, optimizers: Sequence[UsersOptimizer]) -> list[Any]:
    """Drop gradients of parameters that no optimizer has; return the handles of the hooks that do it."""
    owned = {id(p) for users in optimizers for group in users.groups for p in group["params"]}

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    return [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in owned
    ]
