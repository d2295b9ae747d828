"""Optimizers of shards: those that update each element by itself step on local tensors, others on DTensors."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import unwrap
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import LBFGS, Optimizer

from lightning_paral.checkpoint.layout import dtensor_like
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.optimizers import mark_stepped
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.errors import ConfigurationError

_ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"),
)
"""The optimizers of torch that update each element by itself."""

_NOT_IN_STEP = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}


def check_optimizers(
    optimizers: Iterable[Optimizer],
    module: Module,
    originals: Iterable[tuple[str, Parameter]],
    reshard: Callable[[], None],
    undo: ExitStack,
) -> None:
    """Let those `optimizers` that update each element by itself step on local tensors; others step on DTensors.

    An optimizer that was created before `module` was sharded, as by LightningCLI's `--optimizer`, gets the shards.

    Args:
        optimizers: the optimizers of the fit.
        module: the sharded module.
        originals: the names and parameters from before sharding.
        reshard: makes the shards have what code has written, and reshards all units.
        undo: a stack; closing it restores the steps of `optimizers`.

    Raises:
        ConfigurationError: an optimizer has states from before `module` was sharded, or is LBFGS.
    """
    current = dict(module.named_parameters())
    shard_of: dict[Any, Any] = {original: current[name] for name, original in originals}
    for optimizer in optimizers:
        if any(shard_of.get(parameter, parameter) is not parameter for parameter in optimizer.state):
            raise ConfigurationError(
                f"{type(optimizer).__name__} was created before {type(module).__name__} was sharded, and already has "
                "states, which are not sharded. Create it in `configure_optimizers`, from `self.parameters()`, and "
                "not by LightningCLI's `--optimizer`, or train with paral_ddp."
            )
        for group in optimizer.param_groups:
            group["params"] = [shard_of.get(parameter, parameter) for parameter in group["params"]]
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS cannot update sharded parameters: how often it evaluates the closure depends on the loss of its "
                "rank. Train with paral_ddp, or with another optimizer."
            )
        if _name_in_torch(optimizer) in _ELEMENTWISE:
            _step_on_local_tensors(optimizer, reshard, undo)


def give_shards_to_optimizers(shard_of: Callable[[Any], Any]) -> Callable[[], None]:
    """Let optimizers exchange parameters that they are given for `shard_of` them; return a function to undo it.

    Steps, and methods of units such as nanoGPT's `configure_optimizers`, have unsharded parameters.
    """
    add = Optimizer.add_param_group

    def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        given = params if isinstance(params, Tensor | set) else list(params)  # a set is torch's error
        param_group["params"] = tree_map_only(Tensor, shard_of, given)
        add(optimizer, param_group)

    return replace_attributes(Optimizer, {"add_param_group": add_param_group})


def _name_in_torch(optimizer: Optimizer) -> str:
    """Return the name of the optimizer of torch that it is, up to overrides that no step uses; otherwise `""`."""
    own: Any = type(optimizer)
    base: Any = next((cls for cls in own.__mro__ if f"{cls.__module__}.".startswith("torch.optim.")), Optimizer)
    changed = {name for name in dir(base) if unwrap(getattr(own, name)) is not unwrap(getattr(base, name))}
    used = {name for name in changed if not name.startswith("__")} - _NOT_IN_STEP
    return "" if used else str(base.__name__)


def _step_on_local_tensors(optimizer: Optimizer, reshard: Callable[[], None], undo: ExitStack) -> None:
    with_hooks: Any = type(optimizer).step
    own, local_tensors = vars(optimizer).get("step"), _LocalTensors(optimizer)
    if own is not None and getattr(own, "__wrapped__", None) is not with_hooks:
        return  # it is the user's function, not that of a scheduler

    def update(_: Optimizer, closure: Callable[..., Any] | None = None) -> Any:
        with torch.enable_grad():
            result = None if closure is None else closure()
        reshard()
        with local_tensors.in_place():
            with_hooks.__wrapped__(optimizer)  # without the hooks
        if own is not None:
            mark_stepped(optimizer)
        return result

    replaced = MethodType(wraps(own or with_hooks)(Optimizer.profile_hook_step(update)), optimizer)

    def restore() -> None:
        if vars(optimizer).get("step") is replaced:  # and not replaced again, as by a scheduler
            del vars(optimizer)["step"]
            vars(optimizer).update({} if own is None else {"step": own})

    vars(optimizer)["step"] = replaced
    undo.callback(restore)


class _LocalTensors:
    """The local tensors of an optimizer's parameters, gradients and states, for a step of the optimizer.

    A step on 400 small DTensors takes several times as long as on their local tensors. User code sees only DTensors.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters: dict[Any, Parameter] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the optimizer have the local tensors inside the block."""
        optimizer, states = self._optimizer, self._optimizer.state
        params_of_groups = [group["params"] for group in optimizer.param_groups]
        with torch.DisableTorchFunctionSubclass():
            local = {param: self._parameter(param) for params in params_of_groups for param in params}
        before = {own: {key: _local(value) for key, value in states.get(p, {}).items()} for p, own in local.items()}
        # also of parameters that it no longer has, and of the user's keys
        optimizer.state = defaultdict(dict, {key: state for key, state in states.items() if key not in local})
        optimizer.state.update({own: dict(state) for own, state in before.items() if state})
        for group, params in zip(optimizer.param_groups, params_of_groups, strict=True):
            group["params"] = [local[param] for param in params]
        try:
            yield
        finally:
            for param, own in local.items():
                now, given = optimizer.state.get(own, {}), before[own]
                if len(now) != len(given) or not all(map(is_, now.values(), given.values())):
                    changed = {key: value for key, value in now.items() if given.get(key) is not value}
                    states[param].update({key: _sharded_like(param, value) for key, value in changed.items()})
                if own is not param:
                    own.grad = None
            for group, params in zip(optimizer.param_groups, params_of_groups, strict=True):
                group["params"] = params
            optimizer.state = states

    def _parameter(self, param: Any) -> Any:
        if not isinstance(param, DTensor):
            return param
        shard, gradient, own = local_of(param), param.grad, self._parameters.get(param)
        if own is None or not own.is_set_to(shard) or own.requires_grad != param.requires_grad:
            own = self._parameters[param] = Parameter(shard, param.requires_grad)
        if gradient is not None:
            own.grad = _local(gradient)
        return own


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _sharded_like(param: Any, value: Any) -> Any:
    is_of_shard = isinstance(param, DTensor) and isinstance(value, Tensor) and value.dim() > 0
    return dtensor_like(value, param) if is_of_shard else value
