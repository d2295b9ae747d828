"""Decide which layers are split over the tensor ranks, and how."""

from collections.abc import Mapping
from types import MappingProxyType

from torch.nn import Module

from lightning_paral.engines.tensor.candidates import Layer, Tie, find_ties, layers_of, refusals
from lightning_paral.engines.tensor.plan import TensorPlan, check_plan, styles_of
from lightning_paral.engines.tensor.shapes import Chain, plain_chains
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
        self.ties = find_ties(module, self.layers)
        self.splits: dict[str, str] = {}
        self.whole = refusals(module, self.layers)

    # Automatic

    def automatic(self) -> TensorPlan:
        for name, layer in self.layers.items():
            if layer.kind == "embedding" and self._is_too_small(layer):
                self.whole.setdefault(name, f"it has only {layer.num_outputs} rows")
        self._resolve_ties()
        for chain in plain_chains(self.module, self.layers):
            if self._can_be_split(chain):
                self.splits |= dict.fromkeys(chain.opening, "colwise") | dict.fromkeys(chain.closing, "rowwise")
        for name, layer in self.layers.items():
            if name in self.splits or name in self.whole:
                continue
            if layer.kind == "embedding" or self._is_head(name):
                self.splits[name] = "vocab"
            else:
                self.whole[name] = "it is in no feed-forward network or attention of a plain shape"
        return self._plan()

    def _is_too_small(self, layer: Layer) -> bool:
        return self._leaves_a_rank_without(layer.num_outputs) or layer.num_outputs < MIN_ROWS

    def _is_head(self, name: str) -> bool:
        """Return whether a linear layer computes a number for each row of an embedding."""
        layer = self.layers[name]
        rows = {each.num_outputs for each in self.layers.values() if each.kind == "embedding"}
        return layer.num_outputs in rows and not layer.is_transposed and not self._is_too_small(layer)

    def _resolve_ties(self) -> None:
        """Split the rows of a shared weight in all of its layers, or in none."""
        for tie in self.ties:
            reason = self._objection_to_tie(tie)
            for name in tie.layers:
                if reason is None:
                    self.splits[name] = "vocab"
                else:
                    self.whole.setdefault(name, reason)
                    self.splits.pop(name, None)

    def _objection_to_tie(self, tie: Tie) -> str | None:
        everyone = ", ".join((*tie.layers, *tie.others))
        if not tie.allows_vocab(self.layers):
            return f"a parameter is shared by {everyone}"
        kept = [name for name in tie.layers if name in self.whole]
        if kept:
            return f"its weight is shared with {kept[0]}, which stays whole: {self.whole[kept[0]]}"
        if not any(self.layers[name].kind == "embedding" or self._is_head(name) for name in tie.layers):
            return f"a parameter is shared by {everyone}"
        return None

    def _can_be_split(self, chain: Chain) -> bool:
        """Return whether all layers of a chain are free, and can be split evenly; note why they cannot."""
        if any(name in self.splits for name in chain.layers):
            return False
        for name in chain.layers:
            size, what = self._divided(name, "rowwise" if name in chain.closing else "colwise")
            if size % self.num_ranks:
                self.whole.setdefault(name, self._uneven(size, what))
        kept = [name for name in chain.layers if name in self.whole]
        if kept:
            for name in chain.layers:
                self.whole.setdefault(name, f"{kept[0]} stays whole: {self.whole[kept[0]]}")
        return not kept

    # By the user

    def as_user_says(self, plan: Mapping[str, str]) -> TensorPlan:
        styles = styles_of(self.module, plan, self.layers)
        for name, (style, pattern) in styles.items():
            self._check(name, style, pattern)
            self.splits[name] = style
        for tie in self.ties:
            self._check_tie(tie)
        for name in self.layers:
            if name not in self.splits:
                self.whole.setdefault(name, "the plan does not name it")
        return self._plan()

    def _check(self, name: str, style: str, pattern: str) -> None:
        layer = self.layers[name]
        if name in self.whole:
            raise ConfigurationError(f"plan {pattern!r}: {name} cannot be split, because {self.whole[name]}.")
        if layer.kind == "embedding" and style != "vocab":
            raise ConfigurationError(
                f"plan {pattern!r}: {name} is an embedding, which cannot be split {style!r}. Write 'vocab'."
            )
        if style == "vocab" and layer.is_transposed:
            raise ConfigurationError(f"plan {pattern!r}: {name} is a Conv1D, which cannot be split 'vocab'.")
        size, what = self._divided(name, style)
        if style == "vocab" and self._leaves_a_rank_without(size):
            raise ConfigurationError(
                f"plan {pattern!r}: {name} has {size} {what}, too few for {self.num_ranks} tensor ranks: the last one "
                "would have none."
            )
        if style != "vocab" and size % self.num_ranks:
            raise ConfigurationError(
                f"plan {pattern!r}: {name} cannot be split {style!r}, because {self._uneven(size, what)}."
            )

    def _check_tie(self, tie: Tie) -> None:
        named = [name for name in tie.layers if name in self.splits]
        if not named:
            return
        is_same = len(named) == len(tie.layers) and all(self.splits[name] == "vocab" for name in named)
        if not (is_same and tie.allows_vocab(self.layers)):
            raise ConfigurationError(
                f"plan: {named[0]} cannot be split as planned, because a parameter is shared by "
                f"{', '.join((*tie.layers, *tie.others))}. Split all of these as 'vocab', or none of them."
            )

    # Both

    def _divided(self, name: str, style: str) -> tuple[int, str]:
        """Return how many of what are divided among the ranks."""
        layer = self.layers[name]
        if style == "rowwise":
            return layer.num_inputs, "input features"
        return layer.num_outputs, "rows" if layer.kind == "embedding" else "output features"

    def _leaves_a_rank_without(self, size: int) -> bool:
        """Return whether the last rank gets nothing if `size` rows are divided as `torch.chunk` does."""
        return -(-size // self.num_ranks) * (self.num_ranks - 1) >= size

    def _uneven(self, size: int, what: str) -> str:
        return f"{self.num_ranks} ranks do not divide its {size} {what}"

    def _plan(self) -> TensorPlan:
        order = {name: number for number, (name, _) in enumerate(self.module.named_modules())}
        splits = dict(sorted(self.splits.items(), key=lambda item: order[item[0]]))
        whole = {name: self.whole[name] for name in self.layers if name not in splits}
        return TensorPlan(splits=MappingProxyType(splits), whole=MappingProxyType(whole))
