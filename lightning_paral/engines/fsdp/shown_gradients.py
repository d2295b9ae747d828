"""Show the gradients of shards on the unsharded parameters, outside of backward passes."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass, check_backward_passes
from lightning_paral.compat.torch.fsdp import unsharded_param


class ShownGradients:
    """Gives unsharded parameters the gradients of their shards, and the shards what code makes of these.

    A backward pass must find none of them, because FSDP2 would reduce them again: they are hidden when it begins. What
    it leaves on unsharded parameters is therefore not yet reduced, and everything else was assigned by code.
    """

    def __init__(self) -> None:
        self._is_watching = False
        self._passes = 0
        self._shown: dict[Any, Tensor | None] = {}

    def watch(self, after_pass: Callable[[], None], undo: ExitStack) -> None:
        """Hide gradients in backward passes, until `undo` is closed, and call `after_pass` after the outermost."""

        def begin(*_: Any) -> None:
            self.hide(tuple(self._shown))
            self._passes += 1

        def end(is_done: bool) -> None:
            self._passes -= 1
            if is_done and not self._passes:
                after_pass()

        self._is_watching = True
        undo.callback(check_backward_passes(begin, end))

    def show(self, params: Iterable[Any]) -> None:
        """Show the gradients of `FSDPParam`s that are unsharded, unless they have gradients that are not reduced."""
        if self._passes or not self._is_watching:
            return
        hidden = [param for param in params if param not in self._shown]
        with DisableTorchFunctionSubclass():
            for param in hidden:
                unsharded, gradient = unsharded_param(param), param.sharded_param.grad
                if unsharded is None or unsharded.grad is not None:
                    continue
                if gradient is not None:
                    if gradient.device != unsharded.device:  # offloaded
                        continue
                    unsharded.grad_dtype = gradient.dtype  # fp32 for 16 bits
                    unsharded.grad = gradient
                self._shown[param] = gradient

    def hide(self, params: Iterable[Any]) -> None:
        """Take the gradients of `FSDPParam`s away again, and give the shards those that code has assigned."""
        if not self._shown:
            return
        for param in params:
            if param not in self._shown:
                continue
            shown, unsharded, shard = self._shown.pop(param), unsharded_param(param), param.sharded_param
            assert unsharded is not None
            gradient = unsharded.grad
            if gradient is not shown and (shard.grad is shown or shard.grad is None):
                shard.grad = gradient if gradient is None else gradient.to(shard.dtype)
            if gradient is not None:
                unsharded.grad = None
                unsharded.grad_dtype = unsharded.dtype

    def around(self, params: Callable[[], Iterable[Any]], change: Callable[[], None]) -> None:
        """Call `change`, which changes gradients of shards, with the gradients of all `params` hidden."""
        self.hide(tuple(self._shown))
        change()
        self.show(params())
