"""Unshard the parameters of a unit around the outermost call of its methods, and those of the root around each step."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.compat.torch.fsdp import ForwardHooks, groups_of, pre_forward, unsharded_param
from lightning_paral.engines.fsdp.refusals import MIXED
from lightning_paral.engines.fsdp.user_writes import UserWrites

_LIBRARIES = ("torch", "transformers", "lightning", "torchmetrics")


class UnitUnshard:
    """Unshards a unit around calls of any of its public methods.

    FSDP2 unshards only around `forward`, and reshards as soon as a nested call ends. Here, the unit stays unsharded
    until the outermost call ends.

    Args:
        module: a unit.
        methods: names of its public methods.
    """

    def __init__(self, module: Any, methods: list[str]) -> None:
        self._module = module
        self._hooks = ForwardHooks(module)
        self._entered = False
        self._module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        self._module.register_forward_hook(self._after_forward)
        self._in_forward = 0
        for name in methods:
            setattr(self._module, name, self._around(getattr(self._module, name)))

    def reset(self) -> None:
        """Forget calls that an exception ended."""
        self._entered, self._in_forward = False, 0

    def _before_forward(self, module: Module, args: Any, kwargs: Any) -> Any:
        if self._entered:
            self._in_forward += 1
            return args, kwargs
        self._entered = True
        return pre_forward(self._hooks.state, module, args, kwargs)

    def _after_forward(self, module: Module, args: Any, output: Any) -> Any:
        if self._in_forward:
            self._in_forward -= 1
            return output
        self._entered = False
        return self._hooks.after(output)

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._entered:
                return method(*args, **kwargs)
            self._entered = True
            try:
                args, kwargs = pre_forward(self._hooks.state, self._module, args, kwargs)
                output = method(*args, **kwargs)
            finally:
                self._entered = False
            return self._hooks.after(output)

        return call


def public_methods(module: Module) -> list[str]:
    """Return the names of the public methods that the user's classes define for `module`."""
    names: dict[str, None] = {}
    for base in type(module).__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES or base is object:
            continue
        for name, value in vars(base).items():
            public = not name.startswith("_") and not hasattr(Module, name)
            if public and isinstance(value, FunctionType) and not inspect.isgeneratorfunction(value):
                names[name] = None
    return list(names)


class RootUnshard:
    """Unshards the root's parameters while a step runs, and while the module is called outside steps.

    At all other times every parameter is sharded, so that hooks and callbacks read and change the values that are
    trained.

    Args:
        root: the sharded LightningModule.
        units: the `UnitUnshard`s of the other units.
        inner: the modules of the other units; all other direct children of the root belong to the root.
        writes: knows what user code has written.
    """

    def __init__(self, root: Any, units: list[UnitUnshard], inner: set[Module], writes: UserWrites) -> None:
        self._root = root
        self._writes = writes
        self._units = units
        self._hooks = ForwardHooks(root)
        self._depth = 0
        self._in_manual_step = False
        self._in_optimizer = False
        for module in (self._root, *(child for child in self._root.children() if child not in inner)):
            module.register_forward_pre_hook(self._before_call, prepend=True)
            module.register_forward_hook(self._after_call, always_call=True)

    @property
    def is_running(self) -> bool:
        """Whether a step or a call of the module is running, and in it no optimizer."""
        return self._depth > 0 and not self._in_optimizer

    def training_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training step of automatic optimization, whose backward pass follows it."""
        self._enter()
        pre_forward(self._hooks.state, self._root)
        output = step(*args, **kwargs)
        if isinstance(output.get("loss") if isinstance(output, Mapping) else output, DTensor):
            raise RuntimeError(MIXED)
        output = self._hooks.after(output)
        self._depth = 0
        if output is None:
            self._writes.reshard()
        return output

    def manual_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training step of manual optimization, which calls backward passes and optimizers itself."""
        self._enter()
        self._in_manual_step = True
        self._root.unshard()
        try:
            return step(*args, **kwargs)
        finally:
            self._depth, self._in_manual_step = 0, False
            self._writes.reshard()

    def evaluation_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step without a backward pass."""
        self._enter()
        pre_forward(self._hooks.state, self._root)
        output = self._hooks.after(step(*args, **kwargs))
        self._depth = 0
        self._root.reshard()
        return output

    def before_backward(self, loss: Tensor) -> None:
        """In a manual step, make FSDP2 reduce the root's gradients even if no unit computed `loss`."""
        if self._in_manual_step:
            self._hooks.expect_backward(loss)

    def watch_gradients(self, undo: ExitStack) -> None:
        """Show gradients of shards on unsharded parameters, until `undo` is closed."""
        self._writes.gradients.watch(self._after_pass, undo)

    def _after_pass(self) -> None:
        """Reduce what a backward pass has left that FSDP2 has not noticed, because no unit computed its loss."""
        left = [p for p in self._writes.unsharded_params if getattr(unsharded_param(p), "grad", None) is not None]
        if left and all(group.reduce_grads for group in groups_of(self._root)):
            self._hooks.end_backward()
            self._root.unshard()
        self._writes.show_gradients()

    def after_backward(self) -> None:
        """In a manual step, unshard the root's parameters again, because the backward pass resharded them."""
        if self._in_manual_step:
            self._root.unshard()

    def before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reshard all parameters, because `optimizer` changes the shards; its closure finds them as in the step.

        Returns:
            the arguments of the optimizer's step with another closure, as from a step pre-hook of torch.
        """
        if not any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
            return None
        self._set_in_optimizer(True)
        return (optimizer, *map(self._as_in_step, args[1:])), {name: self._as_in_step(kwargs[name]) for name in kwargs}

    def after_optimizer(self, *_: Any) -> None:
        """In a step, unshard the root's parameters again."""
        if self._in_optimizer:
            self._set_in_optimizer(False)

    def _set_in_optimizer(self, in_optimizer: bool) -> None:
        self._in_optimizer = in_optimizer
        if in_optimizer:
            self._writes.reshard()
        elif self._depth:
            self._root.unshard()

    def _as_in_step(self, closure: Any) -> Any:
        if not callable(closure):
            return closure

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._set_in_optimizer(False)
            try:
                return closure(*args, **kwargs)
            finally:
                self._set_in_optimizer(True)

        return call

    def _enter(self) -> None:
        self._depth, self._in_optimizer = 1, False  # also if an error ended the last step
        for unit in self._units:
            unit.reset()

    def _before_call(self, module: Module, args: Any) -> None:
        if self._depth == 0:
            pre_forward(self._hooks.state, self._root)
        elif not all(group.is_unsharded for group in groups_of(self._root)):
            self._root.unshard()  # `state_dict` and `load_state_dict` reshard even within a step
        self._depth += 1

    def _after_call(self, module: Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth == 0:
            output = self._hooks.after(output)
            self._root.reshard()
        return output
