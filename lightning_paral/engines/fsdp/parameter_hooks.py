"""`parameter.register_hook` under FSDP2: hooks get the full gradient of this rank's batch, as under DDP."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch.autograd import gradient_hooks
from lightning_paral.compat.torch.fsdp import name_of, owners_of, unsharded_param
from lightning_paral.engines.fsdp.guards import refuse_hook


class ParameterHooks:
    """Keeps hooks on the original parameters, and calls them when the unsharded parameters get their gradients.

    Hooks registered before the run are therefore called during it, hooks registered during the run stay after it, and
    their handles can remove them at any time.

    Args:
        originals: the parameter that each `FSDPParam` was created from.
        lost: the names and parameters that user code could access before sharding, and that have been replaced since.
    """

    def __init__(self, originals: dict[Any, Parameter], lost: Iterable[tuple[str, Parameter]]) -> None:
        self._originals = originals
        self._attached: set[Any] = set()
        for name, parameter in lost:
            if gradient_hooks(parameter):
                refuse_hook(name, "register_hook (while the parameter had no values yet)")

    def register(self, param: Any, requires_grad: bool, hook: Any) -> RemovableHandle:
        """Register a hook on `param`, an `FSDPParam`, as `torch.Tensor.register_hook` does on a tensor."""
        original = self._originals[param]
        if isinstance(original, DTensor):  # sharded by the user
            refuse_hook(str(name_of(param)), "register_hook")
        original.requires_grad_(requires_grad)  # torch refuses hooks on frozen parameters
        handle: RemovableHandle = original.register_hook(hook)  # type: ignore[no-untyped-call]
        self.attach(param)
        return handle

    def attach(self, param: Any) -> None:
        """Attach the hooks of `param`, if any, to its unsharded parameter. Do nothing before it is first unsharded."""
        unsharded: Tensor | None = unsharded_param(param)
        original = self._originals[param]
        if unsharded is None or param in self._attached or not gradient_hooks(original):
            return
        if not isinstance(unsharded, Parameter) or isinstance(original, DTensor) or unsharded.is_inference():
            refuse_hook(str(name_of(param)), "register_hook")
        self._attached.add(param)
        trained = unsharded.requires_grad
        unsharded.requires_grad_(True)
        Tensor.register_hook(unsharded, partial(_call_hooks, original))  # type: ignore[no-untyped-call]
        unsharded.requires_grad_(trained)


def _call_hooks(original: Parameter, gradient: Tensor) -> Tensor | None:
    hooks = gradient_hooks(original)
    seen = gradient.to(original.dtype)  # parameters unsharded in 16 bits get 16-bit gradients
    changed = False
    for hook in tuple(hooks.values()):
        result = hook(seen)
        if result is not None:
            seen, changed = result, True
    return seen.to(gradient.dtype) if changed else None


def originals_of(params: Iterable[Any], original: Any) -> dict[Any, Parameter]:
    """Return the parameter that each `FSDPParam` was created from.

    Args:
        params: the `FSDPParam`s.
        original: returns the original parameter of a module by its name.
    """
    return {param: original(*owners_of(param)[0]) for param in params}
