"""Find how the output features of linear layers can be split if code between layers divides them into heads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_paral.engines.tensor import proven
from lightning_paral.engines.tensor.activations import RULES
from lightning_paral.engines.tensor.arguments import tensors_in
from lightning_paral.engines.tensor.functions import METADATA, OF_SHAPE
from lightning_paral.engines.tensor.layout import Layout
from lightning_paral.engines.tensor.planner.candidates import Layer
from lightning_paral.engines.tensor.planner.chains import Flow, Label, find_chains
from lightning_paral.engines.tensor.planner.observations import Chain
from lightning_paral.engines.tensor.split_calls import Call

Segments = tuple[int, ...]
Choice = frozenset[tuple[str, Segments]]
"""The segments of each of some layers."""
Alternatives = dict[Choice, Layout]
"""The layout of a tensor for each choice. All choices are of the same layers."""

_MAX_COMBINATIONS = 64


class LayoutTrace:
    """Follows the outputs of linear layers through functions of which each rank can compute its part.

    How a layer has to be split is not known when its output is computed: one layer may compute queries, keys and values
    together. Each tensor therefore has a layout for each way, as long as functions can compute with it.

    Args:
        layers: all layers by name.
        num_ranks: the number of tensor ranks.
        kept: receives the tensors, so that no id is used twice.
    """

    def __init__(self, layers: Mapping[str, Layer], num_ranks: int, kept: list[Any]) -> None:
        self._layers = layers
        self._num_ranks = num_ranks
        self._ways: dict[str, list[Segments]] = {name: self._usual_ways(layer) for name, layer in layers.items()}
        self._found: dict[int, Alternatives] = {}
        self._kept = kept
        self._unused: dict[int, str] = {}  # outputs of first calls: the name of the layer
        self.calls: dict[str, list[Label]] = {}
        """For each layer, the layers of whose outputs its input is made in each call."""
        self._leaks: dict[str, str] = {}
        self._joined: list[Label] = []
        self._constraints: list[tuple[Label, set[Choice]]] = []

    def _usual_ways(self, layer: Layer) -> list[Segments]:
        sizes = [layer.num_outputs // count for count in (1, 2, 3) if layer.num_outputs % count == 0]
        return [(size,) * (layer.num_outputs // size) for size in sizes if size % self._num_ranks == 0]

    # Layers

    def enter(self, name: str, value: Any) -> None:
        """Observe that a layer is called with `value`."""
        found = self._alternatives(value) if isinstance(value, Tensor) else {}
        layer = self._layers[name]
        if layer.kind != "linear":
            if found:
                self.leak(value, f"it is the input of {name}")
            return
        self.calls.setdefault(name, []).append(_layers_of(found))
        if found:
            wanted = Layout(value.ndim - 1, (layer.num_inputs,))
            fitting = {choice for choice, layout in found.items() if layout == wanted}
            self._constrain(_layers_of(found), fitting, f"{name} needs all features of its input, or consecutive ones")

    def leave(self, name: str, output: Tensor) -> None:
        """Observe the output of a linear layer."""
        ways = self._ways[name]
        self._give(output, {frozenset({(name, way)}): Layout(output.ndim - 1, way) for way in ways})
        if not ways:
            self._leaks.setdefault(name, f"{self._num_ranks} ranks do not divide its output features")
        if len(self.calls[name]) == 1:
            self._unused[id(output)] = name

    def leak(self, tensor: Tensor, reason: str) -> None:
        """Observe that something else than a function needs all of `tensor`."""
        for name in _layers_of(self._found.get(id(tensor), {})):
            self._leaks.setdefault(name, reason)

    # Functions

    def before(self, function: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Observe the arguments of a function, and return a function that observes its result."""
        used = {id(tensor): tensor for tensor in tensors_in(args, kwargs) if id(tensor) in self._found}
        if not used or function in METADATA or function in OF_SHAPE or proven.is_harmless(function):
            return lambda _: None
        if function in (torch.split, Tensor.split):
            self._see_pieces(args, kwargs)
        for identity in used:
            self._unused.pop(identity, None)
        found = [self._alternatives(tensor) for tensor in used.values()]
        layers = Label().union(*map(_layers_of, found))
        results: dict[Choice, Any] = {}
        rule = RULES.get(function, _no_rule)
        for choice, layouts in _combinations(found):
            by_id = dict(zip(used, layouts, strict=True))
            call = Call(function, args, kwargs, lambda each, by_id=by_id: by_id.get(id(each)), self._num_ranks)  # type: ignore[misc]
            split = rule(call)
            if split is not None:
                results[choice] = split.result
        if len(layers) > 1:
            self._joined.append(layers)
        self._constrain(layers, set(results), f"its output is used by {proven.name_of(function)}")
        return lambda result: self._after(result, results)

    def _after(self, result: Any, results: dict[Choice, Any]) -> None:
        if isinstance(result, Tensor):
            self._give(result, {choice: layout for choice, layout in results.items() if layout is not None})
        elif isinstance(result, tuple | list):
            for number, each in enumerate(result):
                self._give(each, {choice: layouts[number] for choice, layouts in results.items()})

    def _see_pieces(self, args: Any, kwargs: Any) -> None:
        """Note another way to split a layer whose output is divided into pieces of different sizes."""
        name = self._unused.get(id(args[0])) if args else None
        sizes = args[1] if len(args) > 1 else kwargs.get("split_size", kwargs.get("split_size_or_sections"))
        if name is None or not isinstance(sizes, tuple | list) or sum(sizes) != self._layers[name].num_outputs:
            return
        way = tuple(sizes)
        if way not in self._ways[name] and all(size and size % self._num_ranks == 0 for size in way):
            self._ways[name].append(way)
            self._found[id(args[0])][frozenset({(name, way)})] = Layout(args[0].ndim - 1, way)

    # Results

    def chains(
        self, random: frozenset[str], leaks: Mapping[str, str], taken: Iterable[str]
    ) -> tuple[tuple[Chain, ...], dict[str, str]]:
        """Return the chains, with the segments of their layers, and why other layers have to gather their output.

        Args:
            random: the layers for whose outputs random numbers were drawn.
            leaks: the layers whose output is needed by something that this trace does not see, and why.
            taken: layers that are in other chains.
        """
        flow = Flow(
            calls=self.calls, leaks={**leaks, **self._leaks}, joined=self._joined, random=random, has_layouts=True
        )
        found, reasons = find_chains(self._layers, flow, taken)
        chains = []
        for chain in found:
            chosen = self._choice(chain.opening)
            if chosen is None:
                reasons |= dict.fromkeys(chain.opening, "its features are used in ways that no division suits")
            else:
                chains.append(replace(chain, segments=tuple(chosen[name] for name in chain.opening)))
        return tuple(chains), reasons

    def _choice(self, opening: Sequence[str]) -> dict[str, Segments] | None:
        """Return segments of all layers of a chain that suit all functions between them; `None` if there are none."""
        for ways in product(*(self._ways[name] for name in opening)):
            chosen = dict(zip(opening, ways, strict=True))
            if all(
                frozenset((name, chosen[name]) for name in layers) in allowed
                for layers, allowed in self._constraints
                if layers <= set(opening)
            ):
                return chosen
        return None

    def end(self) -> None:
        """Forget all tensors."""
        self._found.clear()
        self._unused.clear()

    # Alternatives

    def _alternatives(self, tensor: Tensor) -> Alternatives:
        found = self._found.get(id(tensor), {})
        if found and isinstance(tensor.grad_fn, BackwardCFunction):
            self.leak(tensor, "its output is used by an autograd.Function")
        return found

    def _give(self, tensor: Tensor, found: Alternatives) -> None:
        if found:
            self._found[id(tensor)] = found
            self._kept.append(tensor)
        else:
            self._found.pop(id(tensor), None)

    def _constrain(self, layers: Label, fitting: set[Choice], reason: str) -> None:
        if fitting:
            self._constraints.append((layers, fitting))
        else:
            for name in layers:
                self._leaks.setdefault(name, reason)


def _no_rule(call: Call) -> None:
    return None


def _layers_of(found: Alternatives) -> Label:
    return frozenset(name for choice in found for name, _ in choice)


def _combinations(found: Sequence[Alternatives]) -> Iterator[tuple[Choice, tuple[Layout, ...]]]:
    """Yield choices for all of several tensors, and the layouts of these tensors."""
    for number, items in enumerate(product(*(each.items() for each in found))):
        if number == _MAX_COMBINATIONS:
            return
        choice = frozenset[tuple[str, Segments]]().union(*(choice for choice, _ in items))
        if len(dict(choice)) == len(choice):  # the same way for each layer
            yield choice, tuple(layout for _, layout in items)
