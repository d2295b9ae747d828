"""Build DeepSpeed's engines around a module: one that trains, one that only gathers parameters, or one per optimizer.

An engine of DeepSpeed takes a module and a single optimizer (DeepSpeed#1229). At stage 3 it adds hooks to the module
that gather its parameters. With several optimizers, each gets an engine around a module that only holds its parameters.
The user's module then has no engine at stages 1 and 2, and an engine that only gathers parameters at stage 3.
"""

import argparse
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.deepspeed.engine import keep_given_dtype, overlaps, reduce_skipped_by_hooks
from lightning_paral.compat.deepspeed.optimizer import link_round_robin_masters, relink_masters, share_masters
from lightning_paral.engines.zero.engine.checks import check_first_dtype, check_parameters
from lightning_paral.engines.zero.engine.hooks import allow_any_output
from lightning_paral.engines.zero.parameters.partition import make_contiguous, view_scalars_as_bytes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.deepspeed.stage3 import remove_from_forwards, share_coordinator
from lightning_paral.engines.zero.training.users_optimizer import UsersOptimizer, make_engine_optimizer
from lightning_paral.model.buffers import buffers_to_broadcast


def build_training_engine(
    module: Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device
) -> "DeepSpeedEngine":
    """Build an engine that trains `module` with `optimizer`. *Collective* over the world.

    It shards the optimizer state, at stages 2 and 3 also the gradients, and at stage 3 also the parameters.
    Learning-rate schedulers are not passed to it: Lightning steps them, and they change the user's optimizer.
    """
    engine = _initialize(module, config, device, optimizer, trained_parameters(module))
    inner: Any = engine.optimizer.optimizer
    if inner is not optimizer:
        # DeepSpeed 0.19.8 replaces Adagrad by an optimizer with default options and without groups.
        inner.param_groups = optimizer.param_groups
        if engine.zero_optimization_stage() < 3:
            relink_masters(engine.optimizer)
    share_masters(engine.optimizer, engine.zero_optimization_stage())
    if engine.zero_optimization_stage() < 3:
        link_round_robin_masters(engine.optimizer)
    if engine.zero_optimization_stage() == 1 and overlaps(engine.optimizer):
        reduce_skipped_by_hooks(engine.optimizer)
    return engine


def trained_parameters(module: Module) -> list[Parameter]:
    """Return the parameters of `module` that require a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def build_inference_engine(module: Module, config: dict[str, Any], device: torch.device) -> "DeepSpeedEngine":
    """Build an engine without an optimizer, which gathers the parameters of `module` at stage 3. *Collective*."""
    zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_optimizer"}
    return _initialize(module, config | {"zero_optimization": zero}, device, None, [])


def destroy(engine: Any) -> None:
    """Destroy `engine` now, and not again when it is garbage-collected.

    `DeepSpeedEngine.__del__` (0.19.8) calls `destroy` a second time. By then another engine may use the parameters, and
    `destroy` would remove the attributes that this other engine has set on them.
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
    with view_scalars_as_bytes(), keep_given_dtype():
        engine, _, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=device.index),
            config=config,
            model=module,
            model_parameters=parameters,
            optimizer=optimizer,
            dist_init_required=False,
        )
    if config["zero_optimization"]["stage"] == 3:
        allow_any_output(module)
    for change in (Module.train, Module.eval):  # DeepSpeed 0.19.8 sets `training` of the module only
        setattr(engine, change.__name__, MethodType(change, engine))
    engine.training = module.training
    return engine


class _Holder(Module):
    """Holds the trained parameters of one optimizer. It has no forward."""

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
    """Build an engine for each of several optimizers. *Collective* over the world.

    Args:
        module: the module whose parameters the optimizers train.
        optimizers: the user's optimizers. No parameter is in two of them.
        sized_config: a function that returns DeepSpeed's configuration for a module, with sizes that depend on it.
        device: the device of this rank.
        offload: whether optimizers run on the CPU.
        trust: whether to accept optimizers that are not known to be elementwise.

    Returns:
        tuple: the module or engine that runs the steps, and the engine of each optimizer.
    """
    config = sized_config(module)
    is_partitioned = config["zero_optimization"]["stage"] == 3
    trained = [[p for group in users.groups for p in group["params"] if p.requires_grad] for users in optimizers]
    check_parameters(module, [parameter for parameters in trained for parameter in parameters], config)
    inner = [make_engine_optimizer(users, offload=offload, trust=trust) for users in optimizers]
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


def drop_untrained_gradients(module: Module, optimizers: Sequence[UsersOptimizer]) -> list[Any]:
    """Add hooks that drop the gradients of parameters that no optimizer has, and return the handles of the hooks."""
    owned = {id(p) for users in optimizers for group in users.groups for p in group["params"]}

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    return [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in owned
    ]
