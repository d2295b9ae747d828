"""Follow the outputs of linear layers through a step."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.tensors import is_value_missing, tree_leaves
from lightning_paral.engines.tensor import proven
from lightning_paral.engines.tensor.arguments import tensors_in
from lightning_paral.engines.tensor.planner.candidates import Layer, has_backward_hooks, layers_of
from lightning_paral.engines.tensor.planner.chains import Label, find_chains
from lightning_paral.engines.tensor.planner.features import FeatureTrace
from lightning_paral.engines.tensor.planner.layouts import LayoutTrace
from lightning_paral.engines.tensor.planner.modes import Functions, Operations
from lightning_paral.engines.tensor.planner.observations import Observations
from lightning_paral.engines.tensor.planner.references import referred

_FULL: Label = frozenset()


def reason_of(error: Exception) -> str:
    """Return why a step could not be followed, in one line."""
    if is_value_missing(error):
        return "it reads values of tensors"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class DataflowTrace:
    """Follows the outputs of layers during any number of steps, and notes how parameters, logits and heads are used.

    Args:
        module: the module.
        num_ranks: the number of tensor ranks. With 1, features are not followed into heads.
    """

    def __init__(self, module: Module, num_ranks: int = 1) -> None:
        self.module = module
        self.layers: Mapping[str, Layer] = layers_of(module)
        self.notes: list[str] = []
        self.depth = 0
        """How many functions are running whose arguments have been seen."""
        self._inside = 0  # how many layers are running their own forward
        self._logits: dict[int, Label] = {}
        self._by_head: dict[int, str] = {}  # outputs of modules after the first: the name of the module
        self._kept: list[Any] = []  # so that no id is used twice
        self._features = FeatureTrace(self.layers, self._kept)
        self._layouts = LayoutTrace(self.layers, num_ranks, self._kept) if num_ranks > 1 else None
        self._flows: list[FeatureTrace | LayoutTrace] = [self._features]
        if self._layouts is not None:
            self._flows.append(self._layouts)
        self._unproven: dict[str, str] = {}  # layers whose output something uses that is no function of torch
        self._owners: dict[int, str] = {}
        self._parameters: dict[str, list[Any]] = {}
        for name, part in module.named_modules():
            if name in self.layers:
                own = [parameter for parameter in own_parameters(part).values() if parameter is not None]
                self._parameters[name] = own
                self._owners |= {id(parameter): name for parameter in own}
        self._stack: list[str] = []
        self._random_modules: set[str] = set()
        self._heads: set[str] = set()
        self._returns_heads: dict[str, str] = {}
        self._used_directly: dict[str, str] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Observe the calls of all modules and functions."""
        hooks: list[Any] = []
        parts = dict(self.module.named_modules())
        try:
            for name, part in parts.items():
                is_layer = name in self.layers
                enter = self._entering_layer(name) if is_layer else self._entering(name)
                leave = self._leaving_layer(name) if is_layer else self._leaving(name)
                # The user's hooks run before `enter` and after `leave`, so the functions that they call are seen.
                hooks.append(part.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.append(part.register_forward_hook(leave, prepend=True, always_call=True))
            with ExitStack() as stack:
                stack.enter_context(Operations(self))
                stack.enter_context(Functions(self))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not observe what runs, such as a backward pass."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def run(self, name: str, step: Callable[[], Any]) -> None:
        """Run a step. Tensors that are still referred to when it ends, or fails, count as used."""
        try:
            result = step()
        except Exception:
            with self.suspended():
                self._end(name)
            raise
        with self.suspended():
            self._see_result(name, result)
            del result
            self._end(name)

    def _see_result(self, name: str, result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._leak(leaf, f"it is returned from {name}")

    def run_until_error(self, name: str, step: Callable[[], Any]) -> None:
        """Run a step, of which only the beginning is observed if it fails.

        Code that runs after the failure could use no split activations of calls before it. Layers that were not called
        before it are not proven.
        """
        before = {layer: len(calls) for layer, calls in self._features.calls.items()}
        try:
            self.run(name, step)
        except Exception as error:
            self.notes.append(f"{name} could be followed in part only: {reason_of(error)}")
            for layer in self.layers:
                if len(self._features.calls.get(layer, ())) == before.get(layer, 0):
                    self._unproven.setdefault(layer, f"{name} could not be followed up to its call")

    def observations(self, reason: str | None = None) -> Observations:
        """Return what was learned.

        Args:
            reason: why nothing is proven.
        """
        parts = dict(self.module.named_modules())
        for name in self.layers:
            if has_backward_hooks(parts[name]):
                self._unproven.setdefault(name, "a hook sees its gradients")
                for each in Label().union(*(label for flow in self._flows for label in flow.calls.get(name, ()))):
                    self._unproven.setdefault(each, f"a hook of {name} sees its gradients")
        chains, leaks = find_chains(self.layers, self._features.flow(self._unproven))
        if self._layouts is not None:
            random = frozenset(self._features.random)
            more, leaks = self._layouts.chains(random, self._unproven, [each for c in chains for each in c.layers])
            chains = (*chains, *more)
        return Observations(
            chains=() if reason else chains,
            leaks=leaks,
            heads=frozenset(self._heads),
            called=frozenset(self._features.calls),
            used_directly=dict(self._used_directly),
            head_sizes={} if reason else self._features.head_sizes(),
            returns_heads=dict(self._returns_heads),
            random=frozenset(self._random_modules),
            reason=reason,
            notes=tuple(self.notes),
        )

    # Modules

    def _entering(self, name: str) -> Any:
        def enter(_part: Module, _args: Any, _kwargs: Any) -> None:
            self._stack.append(name)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(_part: Module, _args: Any, output: Any) -> None:
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
            if isinstance(output, tuple) and not self.depth and not self._inside:
                for value in output[1:]:
                    for leaf in tree_leaves(value):
                        if isinstance(leaf, Tensor) and id(leaf) not in self._by_head:
                            self._by_head[id(leaf)] = name
                            self._kept.append(leaf)

        return leave

    def _entering_layer(self, name: str) -> Any:
        def enter(part: Module, args: Any, kwargs: Any) -> None:
            if not self.depth and not self._inside:
                with self.suspended():
                    self._enter_layer(name, part, args[0] if args else next(iter(kwargs.values()), None))
            self._inside += 1

        return enter

    def _enter_layer(self, name: str, part: Module, value: Any) -> None:
        current = [parameter for parameter in own_parameters(part).values() if parameter is not None]
        if list(map(id, current)) != list(map(id, self._parameters[name])):
            self._used_directly.setdefault(name, "a functional call")
        for flow in self._flows:
            flow.enter(name, value)

    def _leaving_layer(self, name: str) -> Any:
        def leave(_part: Module, _args: Any, output: Any) -> None:
            self._inside -= 1
            if self.depth or self._inside or self.layers[name].kind != "linear" or not isinstance(output, Tensor):
                return
            with self.suspended():
                self._logits[id(output)] = frozenset({name})
                for flow in self._flows:
                    flow.leave(name, output)

        return leave

    # Functions

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function and label its result. What it calls is not observed."""
        with self.suspended():
            self._see_arguments(function, args, kwargs)
            after = [flow.before(function, args, kwargs) for flow in self._flows]
            result = function(*args, **kwargs)
            for observe in after:
                observe(result)
            if isinstance(result, Tensor) and function in proven.VIEWS and args and id(args[0]) in self._logits:
                self._logits[id(result)] = self._logits[id(args[0])]
                self._kept.append(result)
            return result

    def _see_arguments(self, function: Any, args: Any, kwargs: Any) -> None:
        """Note which parameters, outputs after the first, logits and random numbers the function uses."""
        tensors = tensors_in(args, kwargs)
        if not proven.is_harmless(function):
            for tensor in tensors:
                if id(tensor) in self._owners:
                    name = proven.attribute_of(function) or proven.name_of(function)
                    self._used_directly.setdefault(self._owners[id(tensor)], name)
                if id(tensor) in self._by_head:
                    self._returns_heads.setdefault(self._by_head[id(tensor)], proven.name_of(function))
        if function in proven.LOSSES and tensors:
            self._heads |= self._logits.get(id(tensors[0]), _FULL)
        draws = function in proven.DROPOUT and proven.draws(args, kwargs)
        if function is proven.ATTENTION:
            draws = (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
        if draws:
            self._random_modules |= {*self._stack}

    def before_operation(self, args: Any, kwargs: Any) -> None:
        """Observe an operation that no function of Python has called."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                with self.suspended():
                    self._leak(leaf, "its output is used by code that cannot be followed")

    @property
    def is_quiet(self) -> bool:
        """Whether what runs is not observed: the own forward of a layer, or the inside of a function."""
        return self.depth > 0 or self._inside > 0

    def _leak(self, tensor: Tensor, reason: str) -> None:
        for flow in self._flows:
            flow.leak(tensor, reason)
        if id(tensor) in self._by_head:
            self._returns_heads.setdefault(self._by_head[id(tensor)], reason)

    def _end(self, step: str) -> None:
        """Count tensors to which other objects refer as used, and forget all tensors."""
        gc.collect()
        for tensor in referred(self._kept):
            self._leak(tensor, f"its output is kept after {step}")
        for flow in self._flows:
            flow.end()
        self._logits.clear()
        self._by_head.clear()
        self._stack.clear()
        self._inside = 0
