"""Decide which layers are split over the tensor ranks, and how."""

from collections.abc import Mapping
from types import MappingProxyType

from torch.nn import Module

from lightning_paral.engines.tensor.candidates import layers_of, refusals, shared_parameters
from lightning_paral.engines.tensor.plan import TensorPlan, check_plan, styles_of
from lightning_paral.engines.tensor.shapes import plain_chains
from lightning_paral.errors import ConfigurationError

MIN_ROWS = 256
"""Rows of an embedding, or classes. Smaller embeddings stay whole."""


def make_plan(module: Module, num_ranks: int, plan: str | Mapping[str, str] = "auto") -> TensorPlan:
    """Return how each layer of `module` is split.

    With `"auto"`, those layers are split that have the plain shapes of a feed-forward network or an attention,
    embeddings with at least `MIN_ROWS` rows, and linear layers with as many outputs as an embedding has rows. All
    others stay whole.

    Args:
        module: the module of the run.
        num_ranks: the number of tensor ranks.
        plan: `"auto"`, or the style of each layer by patterns on names, as in `fnmatch`.

    Raises:
        ConfigurationError: the plan names something that cannot be split.
    """
    if num_ranks < 1:
        raise ConfigurationError(f"tensor_parallel={num_ranks} has to be at least 1, a number of ranks.")
    check_plan(plan)
    planner = _Planner(module, num_ranks)
    return planner.automatic() if isinstance(plan, str) else planner.as_user_says(plan)


class _Planner:
    def __init__(self, module: Module, num_ranks: int) -> None:
        self.module, self.num_ranks = module, num_ranks
        self.layers = layers_of(module)
        self.refused = refusals(module, self.layers)
        self.shared = shared_parameters(module, self.layers)
        self.splits: dict[str, str] = {}
        self.whole: dict[str, str] = {}

    def automatic(self) -> TensorPlan:
        rows = {layer.num_outputs for layer in self.layers.values() if layer.kind == "embedding"}
        vocabulary = []
        for name, layer in self.layers.items():
            is_small = layer.num_outputs < MIN_ROWS or self._leaves_a_rank_without(layer.num_outputs)
            if layer.kind == "embedding" and is_small:
                self.refused.setdefault(name, f"it has only {layer.num_outputs} rows")
            is_head = layer.num_outputs in rows and not layer.is_transposed and not is_small
            if layer.kind == "embedding" or is_head:
                vocabulary.append(name)
        sharing = {name: owners for owners in self.shared for name in owners if name in vocabulary}
        for name in vocabulary:
            if name in sharing or self.layers[name].kind == "embedding":
                group = [each for each in sharing.get(name, (name,)) if each in self.layers]
                self._split_all_or_none(dict.fromkeys(group, "vocab"))
        for chain in plain_chains(self.module, self.layers):
            if self.splits.keys().isdisjoint(chain.layers):
                self._split_all_or_none(
                    dict.fromkeys(chain.opening, "colwise") | dict.fromkeys(chain.closing, "rowwise")
                )
        for name in vocabulary:
            if name not in self.splits and name not in self.whole:
                self._split_all_or_none({name: "vocab"})
        return self._plan("it is in no feed-forward network or attention of a plain shape")

    def _split_all_or_none(self, styles: Mapping[str, str]) -> None:
        reasons = {name: reason for name in styles if (reason := self._objection(name, styles))}
        if not reasons:
            self.splits |= styles
            return
        first, reason = next(iter(reasons.items()))
        for name in styles:
            self.whole.setdefault(name, reasons.get(name, f"{first} stays whole: {reason}"))

    def as_user_says(self, plan: Mapping[str, str]) -> TensorPlan:
        found = styles_of(self.module, plan, self.layers)
        self.splits = {name: style for name, (style, _) in found.items()}
        for name, (style, pattern) in found.items():
            if reason := self._objection(name, self.splits):
                raise ConfigurationError(f"plan {pattern!r}: {name} cannot be split {style!r}, because {reason}.")
        return self._plan("the plan does not name it")

    def _objection(self, name: str, styles: Mapping[str, str]) -> str | None:
        """Return why a layer cannot be split as `styles` say, which may leave it out."""
        layer, style = self.layers[name], styles.get(name)
        size, what = layer.num_outputs, "rows" if layer.kind == "embedding" else "output features"
        if style == "rowwise":
            size, what = layer.num_inputs, "input features"
        if name in self.refused:
            return self.refused[name]
        for owners in self.shared:
            rows = {self.layers[each].num_outputs for each in owners if each in self.layers}
            is_same = len(rows) == 1 and set(owners.values()) == {"weight"}
            if name in owners and not (is_same and all(styles.get(each) == "vocab" for each in owners)):
                return f"a parameter is shared by {', '.join(owners)}, which can only be split together, as 'vocab'"
        if style not in (None, "vocab") and layer.kind == "embedding":
            return "it is an embedding, which can be split 'vocab' only"
        if style == "vocab" and layer.is_transposed:
            return "it is a Conv1D, which cannot be split 'vocab'"
        if style == "vocab" and self._leaves_a_rank_without(size):
            return f"its {size} {what} are too few for {self.num_ranks} tensor ranks: the last one would have none"
        if style in ("colwise", "rowwise") and size % self.num_ranks:
            return f"{self.num_ranks} ranks do not divide its {size} {what}"
        return None

    def _leaves_a_rank_without(self, size: int) -> bool:
        """Return whether the last rank gets nothing if `size` rows are divided as `torch.chunk` does."""
        return -(-size // self.num_ranks) * (self.num_ranks - 1) >= size

    def _plan(self, reason: str) -> TensorPlan:
        """Return the plan; `reason` is that of layers that nothing else keeps whole."""
        splits = {name: self.splits[name] for name in self.layers if name in self.splits}
        whole = {
            name: self.whole.get(name) or self._objection(name, {}) or reason
            for name in self.layers
            if name not in splits
        }
        return TensorPlan(splits=MappingProxyType(splits), whole=MappingProxyType(whole))
