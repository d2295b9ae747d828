"""DeepSpeed's engines around a module: one that trains, one that only gathers parameters."""

import argparse
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.checks import check_instance
from lightning_paral.compat.deepspeed.masters import find_masters_again, find_masters_in_round_robin
from lightning_paral.compat.deepspeed.overlap import overlaps, reduce_what_hooks_left
from lightning_paral.compat.deepspeed.weight_dtype import dtype_as_given
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.zero.engine.hooks import allow_any_output
from lightning_paral.engines.zero.parameters.partition import check_not_empty, make_contiguous, scalars_as_bytes
from lightning_paral.errors import ConfigurationError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.deepspeed.coordinator import share_coordinator
from lightning_paral.compat.deepspeed.forward_stack import leave_out_of_forwards
from lightning_paral.engines.zero.options import ZeROOptions
from lightning_paral.engines.zero.training.users_optimizer import UsersOptimizer, engines_optimizer
from lightning_paral.model.buffers import shared_buffers

_PRECISIONS = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
_LOW = {torch.float16, torch.bfloat16}


def build_training_engine(
    module: Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device
) -> "DeepSpeedEngine":
    """Divide `module` and `optimizer` among the ranks. *Collective* over the world.

    The scheduler stays with Lightning: it keeps setting learning rates in the parameter groups, which are shared.
    """
    engine = _initialize(module, config, device, optimizer, trained_of(module))
    inner: Any = engine.optimizer.optimizer
    if inner is not optimizer:
        # DeepSpeed 0.19.8 makes Adagrad anew, from its default options and without groups.
        inner.param_groups = optimizer.param_groups
        if engine.zero_optimization_stage() < 3:
            find_masters_again(engine.optimizer)
    if engine.zero_optimization_stage() < 3:
        find_masters_in_round_robin(engine.optimizer)
    if engine.zero_optimization_stage() == 1 and overlaps(engine.optimizer):
        reduce_what_hooks_left(engine.optimizer)
    return engine


def trained_of(module: Module) -> list[Parameter]:
    """Return the parameters of `module` that an engine trains."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def build_inference_engine(module: Module, config: dict[str, Any], device: torch.device) -> "DeepSpeedEngine":
    """Divide the parameters of `module` at stage 3, to be gathered while they are used. *Collective*."""
    zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_optimizer"}
    return _initialize(module, config | {"zero_optimization": zero}, device, None, [])


def destroy(engine: Any) -> None:
    """Let `engine` give its module back: now, and not once more when it is collected.

    `DeepSpeedEngine.__del__` of 0.19.8 does all of it again. By then a next engine may have the parameters, and would
    lose what it has noted in them.
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
    with scalars_as_bytes(), dtype_as_given():
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


def check_parameters(module: Module, trained: list[Any], config: dict[str, Any]) -> None:
    """Raise a `ConfigurationError` for parameters that DeepSpeed cannot divide or train, or would convert."""
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
            # DeepSpeed 0.19.8 takes the first one's dtype for that of all.
            and (parameter.is_floating_point() or parameter is first)
        ):
            raise ConfigurationError(
                f"{name} is of {_short(parameter.dtype)}, which ZeRO stage 3 cannot divide. Convert the parameter, "
                "make it a buffer, or use paral_zero2 or paral_ddp."
            )


def check_first_dtype(module: Module, optimizer: Optimizer, trained: list[Any], stage: int) -> None:
    """Raise a `ConfigurationError` if stage 2 would exchange gradients in the dtype of a frozen parameter.

    DeepSpeed 0.19.8 takes the dtype of the optimizer's first parameter for that of all gradients.
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
