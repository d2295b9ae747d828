"""What was learned about the layers of a module from following its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Layers between which activations can stay split: no collective is needed from the opening to the closing ones."""

    opening: tuple[str, ...]
    """Linear layers that split their output features."""
    closing: tuple[str, ...]
    """Linear layers that split their input features, which are the outputs of the opening ones."""
    local: tuple[str, ...] = ()
    """Modules in between that stay whole and compute with split activations."""
    is_random: bool = False
    """Whether random numbers are drawn for the split activations."""
    segments: tuple[tuple[int, ...], ...] = ()
    """For each of `opening`, the segments of its output, as in `Layout`, if code between the layers divides features
    into heads or into several tensors. Otherwise empty."""

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that are split."""
        return self.opening + self.closing


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What following the steps of a module has shown. All names are those of `module.named_modules()`."""

    chains: tuple[Chain, ...] = ()
    """No layer is in two chains."""
    leaks: Mapping[str, str] = field(default_factory=dict)
    """Why the output of a layer has to be gathered."""
    heads: frozenset[str] = frozenset()
    """Linear layers whose output reaches a cross-entropy."""
    called: frozenset[str] = frozenset()
    """Layers that were called."""
    used_directly: Mapping[str, str] = field(default_factory=dict)
    """Layers whose parameters are used outside of their forward, and by what."""
    head_sizes: Mapping[str, int] = field(default_factory=dict)
    """Linear layers whose output is only divided into heads, with a number of heads that is inferred: features per
    head."""
    returns_heads: Mapping[str, str] = field(default_factory=dict)
    """Modules whose outputs after the first are used, such as attention weights, and by what."""
    random: frozenset[str] = frozenset()
    """Modules in which random numbers were drawn."""
    reason: str | None = None
    """Why nothing is proven; `None` if the steps could be followed."""
    notes: tuple[str, ...] = ()
    """What could be followed in part only."""


NOT_OBSERVED = Observations(reason="no step was followed")
"""Nothing is known, so every layer gathers its output."""
