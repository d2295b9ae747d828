"""Build DeepSpeed's engine around a module, and adapt its hooks and a check of Lightning's to ordinary steps."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.deepspeed.optimizer import share_masters
from lightning_paral.compat.deepspeed.process import show_outputs_as
from lightning_paral.compat.lightning.strategies import ForwardRedirection
from lightning_paral.compat.torch.modules import FORWARD, hooks_in
from lightning_paral.compat.torch.tensors import tree_leaves, tree_map
from lightning_paral.engines.zero.partition import (
    check_not_empty,
    is_partitioned,
    is_stage3_parameter,
    make_contiguous,
    view_scalars_as_bytes,
)
from lightning_paral.errors import ConfigurationError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def build_training_engine(
    module: Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device
) -> "DeepSpeedEngine":
    """Build an engine that trains `module` with `optimizer`. *Collective* over the world.

    It shards the optimizer state, at stages 2 and 3 also the gradients, and at stage 3 also the parameters.
    Learning-rate schedulers are not passed to it: Lightning steps them, and they change the user's optimizer.
    """
    engine = _initialize(module, config, device, optimizer, trained_parameters(module))
    if engine.zero_offload_optimizer() is None:
        share_masters(engine.optimizer, engine.zero_optimization_stage())
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
    for parameter in module.parameters():
        make_contiguous(parameter)
    if config["zero_optimization"]["stage"] == 3:
        for part in module.modules():
            part.register_forward_hook(_return_views)  # before the hooks of DeepSpeed, which free parameters
    with view_scalars_as_bytes(), _staying_partitioned(module):
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


@contextmanager
def _staying_partitioned(module: Module) -> Iterator[None]:
    """Gather no single parameter of stage 3 inside this context.

    To register a hook on each parameter, DeepSpeed 0.19.8 gathers it and partitions it again: each rank receives the
    whole module. torch's hooks need no values.
    """
    parameters: list[Any] = [parameter for parameter in module.parameters() if is_stage3_parameter(parameter)]
    gathers = [parameter.all_gather for parameter in parameters]
    for parameter, gather in zip(parameters, gathers, strict=True):
        parameter.all_gather = partial(_gather_several, gather)
    try:
        yield
    finally:
        for parameter, gather in zip(parameters, gathers, strict=True):
            parameter.all_gather = gather


def _gather_several(gather: Any, param_list: list[Parameter] | None = None, **options: Any) -> Any:
    return None if param_list is None else gather(param_list, **options)


# What DeepSpeed can shard and train

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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Hooks of DeepSpeed's, and a check of Lightning's


class RootHooksOnce(ForwardRedirection):
    """Runs steps through the engine's `forward`, and calls DeepSpeed's hooks on the root module once per step.

    Most steps call `self(...)`, which calls the root module again inside its own call. DeepSpeed's hooks would treat
    that as the start and the end of a forward pass: stage 3 would lose the order of modules by which it prefetches, and
    parameters used after `self(...)` outside their module would not be gathered.

    Args:
        installed: the keys of the hooks that DeepSpeed added to the root module, by the attribute that stores them.
    """

    def __init__(self, installed: dict[str, set[int]]) -> None:
        super().__init__()
        self._installed = installed

    def __call__(
        self, wrapper_module: Module, original_module: LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the method `method_name` of `original_module` inside a call of `wrapper_module`."""
        method, forward = getattr(original_module, method_name), original_module.forward

        def step(*args: Any, **kwargs: Any) -> Any:
            original_module.forward = forward  # type: ignore[method-assign]
            with self._without_installed(original_module):
                return method(*args, **kwargs)

        original_module.forward = step  # type: ignore[method-assign]
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            original_module.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def _without_installed(self, module: Module) -> Iterator[None]:
        """Remove DeepSpeed's hooks inside this context. Hooks that a step adds stay."""
        before = {name: dict(hooks_in(module, name)) for name in FORWARD}
        for name in FORWARD:
            for key in self._installed[name]:
                hooks_in(module, name).pop(key, None)
        try:
            yield
        finally:
            for name in FORWARD:
                hooks = hooks_in(module, name)
                new = {key: hook for key, hook in hooks.items() if key not in before[name]}
                hooks.clear()
                hooks.update(before[name] | new)


def forward_hook_keys(module: Module) -> dict[str, set[int]]:
    """Return the keys of the forward hooks on `module`, by the attribute that stores them."""
    return {name: set(hooks_in(module, name)) for name in FORWARD}


def new_forward_hook_keys(module: Module, before: dict[str, set[int]]) -> dict[str, set[int]]:
    """Return the keys of the forward hooks added to `module` since `forward_hook_keys(module)` returned `before`."""
    return {name: keys - before[name] for name, keys in forward_hook_keys(module).items()}


def allow_any_output(module: Module) -> None:
    """Let every module in `module` return any object; the hooks of stage 3 see only the tensors in it.

    DeepSpeed 0.19.8 searches the output of every module for parameters with `vars(output)`, which fails for numbers and
    strings, and calls `startswith` on the keys of dictionaries. Outputs of steps are affected as well: `predict_step`
    may return a class index or a file name.

    Args:
        module: the module of a stage-3 engine.
    """
    show_outputs_as(module, _tensors_in)


def _return_views(module: Module, inputs: Any, output: Any) -> Any:
    """Replace parameters that a module returns by views, which stay full when DeepSpeed frees the parameters."""
    if type(output) is Tensor or not any(map(is_stage3_parameter, tree_leaves(output))):
        return None
    return tree_map(_view, output)


def _view(value: Any) -> Any:
    if not is_stage3_parameter(value):
        return value
    if is_partitioned(value):
        value._access.gather(value)
    return value.view_as(value)


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (list, tuple)):
        values: Any = output
    else:
        values = (output if isinstance(output, dict) else getattr(output, "__dict__", {})).values()
    return [value for value in values if isinstance(value, Tensor)]
