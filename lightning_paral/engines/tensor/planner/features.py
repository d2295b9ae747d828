"""Follow the output features of linear layers through functions that act on each feature separately."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_paral.engines.tensor import proven
from lightning_paral.engines.tensor.arguments import tensors_in
from lightning_paral.engines.tensor.planner.candidates import Layer
from lightning_paral.engines.tensor.planner.chains import Flow, Label

_FULL: Label = frozenset()


class FeatureTrace:
    """Labels tensors with the linear layers whose output features they hold.

    Args:
        layers: all layers by name.
        kept: receives the tensors, so that no id is used twice.
    """

    def __init__(self, layers: Mapping[str, Layer], kept: list[Any]) -> None:
        self._layers = layers
        self._kept = kept
        self._labels: dict[int, Label] = {}
        self.calls: dict[str, list[Label]] = {}
        """For each layer, the layers of whose outputs its input is made in each call."""
        self.random: set[str] = set()
        """The layers for whose outputs random numbers were drawn."""
        self._leaks: dict[str, str] = {}
        self._joined: list[Label] = []
        self._head_sizes: dict[str, set[int]] = {}
        self._not_heads: set[str] = set()

    def enter(self, name: str, value: Any) -> None:
        """Observe that a layer is called with `value`."""
        label = self._label_of(value) if isinstance(value, Tensor) else _FULL
        if label and self._layers[name].kind != "linear":
            self._leak(label, f"it is the input of {name}")
            label = _FULL
        self._not_heads |= label
        self.calls.setdefault(name, []).append(label)

    def leave(self, name: str, output: Tensor) -> None:
        """Observe the output of a linear layer."""
        self._give(output, frozenset({name}))

    def leak(self, tensor: Tensor, reason: str) -> None:
        """Observe that something else than a function needs all of `tensor`."""
        label = self._labels.get(id(tensor), _FULL)
        self._not_heads |= label
        self._leak(label, reason)

    def before(self, function: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Observe the arguments of a function, and return a function that observes its result."""
        label = self._before(function, args, kwargs)

        def after(result: Any) -> None:
            if label and isinstance(result, Tensor):
                self._give(result, label)

        return after

    def _before(self, function: Any, args: Any, kwargs: Any) -> Label:
        tensors = tensors_in(args, kwargs)
        if proven.is_harmless(function) or not any(id(tensor) in self._labels for tensor in tensors):
            return _FULL
        label = self._result_label(function, args, kwargs, tensors)
        if label:
            self._not_heads |= label
            return label
        attribute = proven.attribute_of(function)
        reason = f"its {attribute} is read" if attribute else f"its output is used by {proven.name_of(function)}"
        for tensor in tensors:
            found = self._label_of(tensor)
            self._see_heads(function, args, kwargs, found)
            self._leak(found, reason)
        return _FULL

    def _result_label(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Label:
        """Return the label of the result, if the function keeps the features apart; otherwise an empty one."""
        if kwargs.get("out") is not None or not args or not isinstance(args[0], Tensor | int | float):
            return _FULL
        labels = [self._label_of(tensor) for tensor in tensors]
        if function in proven.CONVERSIONS:
            return labels[0]
        if function in proven.UNARY or function in proven.DROPOUT:
            others = tensors[1:]
            if function in proven.DROPOUT and proven.draws(args, kwargs):
                self.random |= labels[0]
            return labels[0] if all(map(proven.is_constant, others)) else _FULL
        if function not in proven.BINARY:
            return _FULL
        split = [tensor for tensor, label in zip(tensors, labels, strict=True) if label]
        others = [tensor for tensor, label in zip(tensors, labels, strict=True) if not label]
        if not split or not all(map(proven.is_constant, others)) or any(each.shape != split[0].shape for each in split):
            return _FULL
        label = _FULL.union(*labels)
        if len({self._layers[name].num_outputs for name in label}) > 1:
            return _FULL
        if len(label) > 1:
            self._joined.append(label)
        return label

    def _see_heads(self, function: Any, args: Any, kwargs: Any, label: Label) -> None:
        """Note whether the function divides the features of a layer into heads without giving their number."""
        size = proven.head_size(function, args, kwargs)
        for name in label:
            if size is None or len(label) > 1 or self._layers[name].num_outputs % size:
                self._not_heads.add(name)
            else:
                self._head_sizes.setdefault(name, set()).add(size)

    def flow(self, leaks: Mapping[str, str]) -> Flow:
        """Return how the outputs were used.

        Args:
            leaks: the layers whose output is needed by something that is not seen here, and why.
        """
        return Flow(
            calls={name: calls for name, calls in self.calls.items() if self._layers[name].kind == "linear"},
            leaks={**leaks, **self._leaks},
            joined=self._joined,
            random=frozenset(self.random),
        )

    def head_sizes(self) -> dict[str, int]:
        """Return the features per head of the layers that are only divided into heads, whose number is inferred."""
        sizes = {name: min(found) for name, found in self._head_sizes.items() if len(found) == 1}
        return {name: size for name, size in sizes.items() if name not in self._not_heads}

    def end(self) -> None:
        """Forget all tensors."""
        self._labels.clear()

    def _label_of(self, tensor: Tensor) -> Label:
        label = self._labels.get(id(tensor), _FULL)
        # The backward pass of the user's own function need not act on each feature separately.
        if label and isinstance(tensor.grad_fn, BackwardCFunction):
            self._leak(label, "its output is used by an autograd.Function")
            self._not_heads |= label
            return _FULL
        return label

    def _give(self, tensor: Tensor, label: Label) -> None:
        self._labels[id(tensor)] = label
        self._kept.append(tensor)

    def _leak(self, label: Label, reason: str) -> None:
        for name in label:
            self._leaks.setdefault(name, reason)
