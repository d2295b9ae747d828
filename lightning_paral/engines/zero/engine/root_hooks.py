"""Steps run through the engine, whose hooks on the root module fire once per step however often it calls itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch.nn import Module

from lightning_paral.compat.lightning.forward_redirection import ForwardRedirection
from lightning_paral.compat.torch.module_hooks import FORWARD, hooks_in


class RootHooksOnce(ForwardRedirection):
    """Lightning's redirection of `training_step` and the like through the wrapper's `forward`.

    A step mostly calls `self(...)`, which calls the root module again, inside its own call. DeepSpeed's hooks would
    take that for the start and the end of a forward: at stage 3 it would lose the order of modules it prefetches by,
    and parameters used after `self(...)` outside their module would not be gathered.

    Args:
        installed: keys of the hooks DeepSpeed has put on the root module, by the attribute they are in.
    """

    def __init__(self, installed: dict[str, set[int]]) -> None:
        super().__init__()
        self._installed = installed

    def __call__(
        self, wrapper_module: Module, original_module: LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `original_module.method_name` inside a call of `wrapper_module`."""
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


def hooks_of(module: Module) -> dict[str, set[int]]:
    """Return the keys of the forward hooks on `module`, by the attribute they are in."""
    return {name: set(hooks_in(module, name)) for name in FORWARD}


def new_hooks(module: Module, before: dict[str, set[int]]) -> dict[str, set[int]]:
    """Return the keys of the forward hooks that were put on `module` since `before = hooks_of(module)`."""
    return {name: keys - before[name] for name, keys in hooks_of(module).items()}
