"""Reject modules that cannot be sharded, and hooks and parameters that FSDP2 would silently ignore."""

from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.pytorch.callbacks import ModelPruning
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.compat.torch.fsdp import is_param_of, owners_of
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.engines.fsdp.snapshot import LEFT_SHARDED
from lightning_paral.errors import ConfigurationError

_INSTEAD = (
    "FSDP does not accumulate gradients through autograd, so the hook would never be called, or only with this rank's "
    "gradient. Read and change gradients in on_after_backward or on_before_optimizer_step, where they are "
    "averaged, or train with paral_ddp."
)


def check_module(module: Module) -> None:
    """Raise a `ConfigurationError` if FSDP1 wraps a submodule, or if an earlier run left `module` sharded."""
    if hasattr(module, LEFT_SHARDED):
        raise ConfigurationError(
            f"{type(module).__name__} was left sharded by an earlier run, which could not gather it: "
            f"{getattr(module, LEFT_SHARDED)}. Load a checkpoint into a new module."
        )
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise ConfigurationError(
                f"{name or type(module).__name__!r} is wrapped in torch's FullyShardedDataParallel (FSDP1), which "
                "cannot be combined with FSDP2. Leave the module unwrapped, so that the strategy shards it, or use "
                "fully_shard."
            )


def check_user_hooks(module: Module) -> None:
    """Raise a `ConfigurationError` if a parameter of `module` has hooks that FSDP2 would not call."""
    for name, parameter in module.named_parameters():
        hooks_by_method = {"register_post_accumulate_grad_hook": post_accumulate_grad_hooks(parameter)}
        if isinstance(parameter, DTensor):
            hooks_by_method["register_hook"] = gradient_hooks(parameter)
        for method, hooks in hooks_by_method.items():
            if hooks:
                hook = next(iter(hooks.values()))
                raise ConfigurationError(
                    f"{name} has a hook, {getattr(hook, '__qualname__', hook)!r}, from {method}. {_INSTEAD}"
                )


def refuse_hook(name: str, method: str) -> NoReturn:
    """Raise a `ConfigurationError`: `method` cannot register a hook on parameter `name`."""
    raise ConfigurationError(f"{method} was called on {name}. {_INSTEAD}")


def check_pruning(callbacks: Iterable[Any]) -> None:
    """Raise a `ConfigurationError` for callbacks that prune, since they replace parameters after these are sharded."""
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} replaces weights by weight_orig and weight_mask during the run, and FSDP "
                "cannot shard them again. Train with paral_ddp, or prune in __init__ with torch.nn.utils.prune."
            )


class RegistrationGuard:
    """Raises a `ConfigurationError` if a parameter is registered in, or deleted from, a module while it is sharded.

    A new parameter would be neither sharded nor trained, and FSDP2 would restore a replaced or deleted parameter at the
    next unshard.

    Args:
        root: the sharded LightningModule.
        params: the `FSDPParam`s of `root`.
    """

    def __init__(self, root: Module, params: list[Any]) -> None:
        self._places: dict[tuple[Module, str], Any] = {}
        for param in params:
            self._places.update(dict.fromkeys(owners_of(param), param))
        parts = {part: name for name, part in root.named_modules()}
        originals = (Module.register_parameter, Module.__delattr__)

        def register_parameter(module: Module, name: str, param: Parameter | None) -> None:
            if module in parts:
                self._check(module, parts[module], name, param)
            originals[0](module, name, param)

        def delete(module: Module, name: str) -> None:
            if (module, name) in self._places:
                self._check(module, parts[module], name, None)
            originals[1](module, name)

        self._undo = replace_attributes(Module, {"register_parameter": register_parameter, "__delattr__": delete})

    def remove(self) -> None:
        """Restore the methods of `torch.nn.Module`."""
        self._undo()

    def _check(self, module: Module, module_name: str, name: str, param: Parameter | None) -> None:
        place = self._places.get((module, name))
        # In modules that define `__setattr__`, FSDP2 itself registers parameters this way.
        if param is None if place is None else is_param_of(param, place):
            return
        where = module_name or type(module).__name__
        raise ConfigurationError(
            f"Parameter {name!r} was set or deleted in {where} ({type(module).__name__}) while it is sharded. It would "
            "be neither sharded nor saved. Register parameters, prune and parametrize in __init__ or configure_model; "
            "change values with parameter.copy_(...) or load_state_dict (without assign=True); or train with "
            "paral_ddp."
        )
