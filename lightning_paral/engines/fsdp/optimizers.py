"""Check that optimizers hold the shards, and that they can update DTensors."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import MethodType
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.engines.fsdp.user_writes import UserWrites
from lightning_paral.errors import CheckpointError, ConfigurationError

_UNSUPPORTED = {
    "LBFGS": "it concatenates all parameters into one vector",
    "Adafactor": "it updates means over rows in place",
}
_ON_SHARDS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD")
"""The optimizers of torch that only do what DTensors can do on shards."""
_NO_KERNEL = {"fused": ("SGD", "Adagrad"), "foreach": ("Rprop",)}
"""By option, the optimizers for which torch (2.13) has no fused or foreach kernel that takes DTensors."""


class Sharded(Protocol):
    """What has sharded a module."""

    writes: UserWrites
    """Lets the optimizers that torch does not run on shards use full tensors."""

    replicated: list[Parameter]
    """The parameters that each rank holds in full."""

    def original_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the names and parameters from before sharding."""


def check_optimizers(optimizers: Iterable[Optimizer], module: Module, sharded: Sharded, device: torch.device) -> None:
    """Check `optimizers`, and name the optimizer in errors that DTensors cause in its step.

    An optimizer that was created before `module` was sharded, as by LightningCLI's `--optimizer`, gets the shards.

    Raises:
        ConfigurationError: an optimizer has states from before `module` was sharded, or cannot update all its
            parameters.
    """
    current = dict(module.named_parameters())
    shard_of: dict[Any, Any] = {original: current[name] for name, original in sharded.original_parameters()}
    for optimizer in optimizers:
        if any(shard_of.get(parameter, parameter) is not parameter for parameter in optimizer.state):
            raise ConfigurationError(
                f"{type(optimizer).__name__} was created before {type(module).__name__} was sharded, and already has "
                "states, which are not sharded. Create it in `configure_optimizers`, from `self.parameters()`, and "
                "not by LightningCLI's `--optimizer`, or train with paral_ddp."
            )
        for group in optimizer.param_groups:
            group["params"] = [shard_of.get(parameter, parameter) for parameter in group["params"]]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _check_one_call(optimizer, held, sharded.replicated)
        _check_supported(optimizer, held, device)
        _name_optimizer_in_errors(optimizer, sharded)


def _name_in_torch(optimizer: Optimizer) -> str:
    """Return the name of the optimizer of torch whose `step` it has; otherwise an empty string."""
    base: Any = next((cls for cls in type(optimizer).__mro__ if f"{cls.__module__}.".startswith("torch.optim.")), None)
    return "" if base is None or base.step is not type(optimizer).step else str(base.__name__)


def _check_one_call(optimizer: Optimizer, held: list[Parameter], replicated: list[Parameter]) -> None:
    together = [option for option in ("foreach", "fused") if optimizer.defaults.get(option)]
    full = set(replicated) & set(held)
    if together and full and len(held) > len(full):
        raise ConfigurationError(
            f"{type(optimizer).__name__}({together[0]}=True) would update shards and the {len(full)} "
            "0-dimensional, empty or complex parameter(s) that are not sharded in one call, which torch does not "
            "support. Leave the option out, or give the parameters that have `dim() == 0` the shape [1]."
        )


def _check_supported(optimizer: Optimizer, held: list[Parameter], device: torch.device) -> None:
    if not any(isinstance(parameter, DTensor) for parameter in held):
        return
    name = _name_in_torch(optimizer)
    if name in _UNSUPPORTED:
        raise ConfigurationError(
            f"{name} cannot update sharded parameters: {_UNSUPPORTED[name]}, and torch cannot do that with DTensors. "
            "Train with paral_ddp, or with another optimizer."
        )
    for option, names in _NO_KERNEL.items():
        chosen = any(group.get(option) for group in optimizer.param_groups)
        default = option == "foreach" and device.type != "cpu"
        if name in names and (
            chosen or (default and any(group.get(option) is None for group in optimizer.param_groups))
        ):
            raise ConfigurationError(
                f"{name}({option}=True{'' if chosen else ', the default on CUDA'}) cannot update sharded parameters: "
                f"torch has no such kernel for DTensors. Use {name}({option}=False)."
            )


def _name_optimizer_in_errors(optimizer: Optimizer, sharded: Sharded) -> None:
    step = optimizer.step
    closure_errors: list[BaseException] = []
    access, runs_on_shards = sharded.writes.access, _name_in_torch(optimizer) in _ON_SHARDS

    def watch(closure: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> Any:
            try:
                with access.suspended(False):
                    result = closure()
                access.flush()  # what hooks in the closure have written
                return result
            except BaseException as error:
                closure_errors.append(error)
                raise

        return run

    @wraps(step)
    def named(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        args = tuple(watch(value) if callable(value) else value for value in args)
        kwargs = {key: watch(value) if callable(value) else value for key, value in kwargs.items()}
        access.flush()
        try:
            with access.suspended(runs_on_shards):
                return step(*args, **kwargs)
        except RuntimeError as error:
            # A CheckpointError comes from the shards that an optimizer holds after a fit, which are not DTensors.
            if error in closure_errors or isinstance(error, CheckpointError):
                raise
            raise ConfigurationError(
                f"{type(optimizer).__name__} does something in `step` that fails with sharded parameters (DTensors): "
                f"{str(error).splitlines()[0][:300]} Train with paral_ddp, or with another optimizer."
            ) from error
        finally:
            closure_errors.clear()

    optimizer.step = MethodType(named, optimizer)  # type: ignore[method-assign]
