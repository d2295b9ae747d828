"""Find chains: linear layers between which activations can stay split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_paral.engines.tensor.planner.candidates import Layer
from lightning_paral.engines.tensor.planner.observations import Chain

Label = frozenset[str]
"""The layers of whose output features a tensor has a part."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How the outputs of linear layers were used."""

    calls: Mapping[str, Sequence[Label]]
    """For each layer, in the order of the first calls: the label of its input in each call; empty for a full input."""
    leaks: Mapping[str, str]
    """The layers whose output was used in a way that needs all features, and how."""
    joined: Sequence[Label] = ()
    """Layers whose outputs an operation combined."""
    random: frozenset[str] = field(default_factory=frozenset)
    """The layers for whose outputs random numbers were drawn."""
    has_layouts: bool = False
    """Whether the code between layers may divide features into heads, or into several tensors."""


def find_chains(
    layers: Mapping[str, Layer], flow: Flow, taken: Iterable[str] = ()
) -> tuple[tuple[Chain, ...], dict[str, str]]:
    """Return the chains, and why the output of each other layer has to be gathered. Layers in `taken` are in no chain.

    A chain needs a proof for every call: all uses of the outputs of its opening layers act on each feature separately,
    and all inputs of its closing layers come from opening layers with the same number of features. If layers follow one
    another, the first that can opens a chain.
    """
    chains: list[Chain] = []
    leaks, closed = dict(flow.leaks), set(taken)
    for first in flow.calls:
        if first in closed or first in leaks:
            continue
        opening, closing = _component(first, flow, closed)
        if not closing:
            leaks[first] = "its output reaches no other linear layer"
            continue
        reason = _objection(opening, closing, layers, flow, leaks, closed)
        if reason is None:
            chains.append(
                Chain(
                    opening=tuple(name for name in flow.calls if name in opening),
                    closing=tuple(name for name in flow.calls if name in closing),
                    is_random=not flow.random.isdisjoint(opening),
                )
            )
            closed |= closing | opening
        else:
            leaks |= {name: reason for name in opening if name not in leaks}
    return tuple(chains), {name: reason for name, reason in leaks.items() if name not in closed}


def _component(first: str, flow: Flow, closed: set[str]) -> tuple[set[str], set[str]]:
    """Return the layers that are split together with `first`: those that open, and those that close."""
    opening, closing = {first}, set[str]()
    while True:
        more = set(opening)
        for label in flow.joined:
            if not label.isdisjoint(opening):
                more |= label
        for name, labels in flow.calls.items():
            for label in labels:
                if not label.isdisjoint(opening):
                    closing.add(name)
                if name in closing:
                    more |= label
        more -= closed
        if more == opening:
            return opening, closing
        opening = more


def _objection(
    opening: set[str],
    closing: set[str],
    layers: Mapping[str, Layer],
    flow: Flow,
    leaks: Mapping[str, str],
    closed: set[str],
) -> str | None:
    """Return why the layers do not form a chain."""
    for name in sorted(opening):
        if name in leaks:
            return leaks[name] if len(opening) == 1 else f"{name} is used with it, and {leaks[name]}"
    if opening & closing:
        return f"{min(opening & closing)} is used both before and after it"
    if (opening | closing) & closed:
        return f"{min((opening | closing) & closed)} is in another chain"
    for label in flow.joined:
        if not label.isdisjoint(opening) and not label <= opening:
            return f"it is combined with the output of {min(label - opening)}"
    sizes = {layers[name].num_outputs for name in opening}
    for name in sorted(closing):
        if any(not label or not label <= opening for label in flow.calls[name]):
            return f"{name} is also called with another input"
        if sizes != {layers[name].num_inputs} and not flow.has_layouts:
            return f"{name} has another number of features"
    return None
