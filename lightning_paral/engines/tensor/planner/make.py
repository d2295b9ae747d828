"""Decide which layers are split over the tensor ranks, and how."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from lightning_paral.engines.tensor.plan import Split, TensorPlan
from lightning_paral.engines.tensor.planner.candidates import Layer, layers_of, refusals
from lightning_paral.engines.tensor.planner.observations import NOT_OBSERVED, Chain, Observations
from lightning_paral.engines.tensor.planner.ties import Tie, find_ties
from lightning_paral.engines.tensor.planner.transformers_plans import attention_chains, check_heads, library_plan
from lightning_paral.engines.tensor.planner.user_plan import check_plan, styles_of
from lightning_paral.errors import ConfigurationError

MIN_WEIGHT = 4096
"""Elements of a weight. Smaller layers outside of chains stay whole, since a collective costs more than they do."""
MIN_ROWS = 256
"""Rows of an embedding, or classes. Smaller embeddings stay whole, unless transformers plans to split them."""


def make_plan(
    module: Module, num_ranks: int, observations: Observations = NOT_OBSERVED, plan: str | Mapping[str, str] = "auto"
) -> TensorPlan:
    """Return how each layer of `module` is split.

    With `"auto"`, the chains are split whose activations can stay split: those that the observations prove, and
    attentions as planned by transformers. Other linear layers with at least `MIN_WEIGHT` elements gather their output;
    embeddings with at least `MIN_ROWS` rows and output heads are split by rows. Layers stay whole if their features
    cannot be divided evenly, if their weight is used outside of their forward, or if no step called them.

    Args:
        module: the module of the run.
        num_ranks: the number of tensor ranks.
        observations: what following a step has shown. By default nothing, so every layer gathers its output.
        plan: `"auto"`, or the style of each layer by patterns on names, as in `fnmatch`.

    Raises:
        ConfigurationError: the plan names something that cannot be split, or `num_ranks` does not divide the heads of
            an attention that transformers plans to split.
    """
    if num_ranks < 1:
        raise ConfigurationError(f"tensor_parallel={num_ranks} has to be at least 1, a number of ranks.")
    check_plan(plan)
    planner = _Planner(module, num_ranks, observations)
    return planner.automatic() if isinstance(plan, str) else planner.as_user_says(plan)


class _Planner:
    def __init__(self, module: Module, num_ranks: int, observations: Observations) -> None:
        self.module, self.num_ranks, self.observations = module, num_ranks, observations
        self.layers = layers_of(module)
        self.ties = find_ties(module, self.layers)
        self.library = library_plan(module)
        self.splits: dict[str, Split] = {}
        self.whole = refusals(module, self.layers)
        for name, function in observations.used_directly.items():
            self.whole.setdefault(name, f"its weight is used outside of its forward: {function}")

    # Automatic

    def automatic(self) -> TensorPlan:
        self._keep_experts()
        self._keep_uncalled()
        for name, layer in self.layers.items():
            if layer.kind == "embedding":
                reason = self._objection_to_vocab(layer)
                if reason is not None:
                    self.whole.setdefault(name, reason)
        attentions, _ = attention_chains(
            self.module, self.library, self.layers, self.observations, self.whole | self._tied()
        )
        self._resolve_ties()
        for chain in attentions:
            check_heads(self.module, chain, self.num_ranks, self.observations, self.layers)
        for chain in (*attentions, *self.observations.chains):
            if self._can_be_split(chain):
                self._add_chain(chain)
        for name, layer in self.layers.items():
            if name in self.splits or name in self.whole:
                continue
            if layer.kind == "embedding" or self._is_head(name):
                self.splits[name] = Split(style="vocab")
            elif layer.numel < MIN_WEIGHT:
                self.whole[name] = f"its weight has fewer than {MIN_WEIGHT} elements"
            elif layer.num_outputs % self.num_ranks:
                self.whole[name] = self._uneven(layer.num_outputs, "output features")
            else:
                self.splits[name] = Split(style="colwise")
        return self._plan()

    def _keep_experts(self) -> None:
        for expert in self.library.experts:
            for name in self.layers:
                if name == expert or name.startswith(f"{expert}."):
                    self.whole.setdefault(name, "it belongs to experts")

    def _keep_uncalled(self) -> None:
        """Keep layers that no step has called, unless a tied one was called."""
        if self.observations.reason is not None:
            return
        called = set(self.observations.called)
        for tie in self.ties:
            if not called.isdisjoint(tie.layers):
                called |= set(tie.layers)
        for name in self.layers:
            if name not in called:
                self.whole.setdefault(name, "no step calls it")

    def _objection_to_vocab(self, layer: Layer) -> str | None:
        is_planned = layer.name in self.library.vocabulary
        if self._leaves_a_rank_without(layer.num_outputs) or (not is_planned and layer.num_outputs < MIN_ROWS):
            return f"it has only {layer.num_outputs} rows"
        if not is_planned and layer.numel < MIN_WEIGHT:
            return f"its weight has fewer than {MIN_WEIGHT} elements"
        return None

    def _is_head(self, name: str) -> bool:
        layer = self.layers[name]
        if layer.is_transposed or self._leaves_a_rank_without(layer.num_outputs):
            return False
        is_large = layer.numel >= MIN_WEIGHT
        return name in self.library.vocabulary or (is_large and name in self.observations.heads)

    def _tied(self) -> dict[str, str]:
        return {name: "its weight is shared" for tie in self.ties for name in tie.layers}

    def _resolve_ties(self) -> None:
        """Split the rows of a shared weight in all of its layers, or in none."""
        for tie in self.ties:
            reason = self._objection_to_tie(tie)
            for name in tie.layers:
                if reason is None:
                    self.splits[name] = Split(style="vocab")
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
        """Return whether all layers of a chain can be split evenly."""
        if any(name in self.whole or name in self.splits for name in chain.layers):
            return False
        sizes = [self.layers[name].num_outputs for name in chain.opening]
        return all(size % self.num_ranks == 0 for size in sizes) and all(
            self.layers[name].num_inputs % self.num_ranks == 0 for name in chain.closing
        )

    def _add_chain(self, chain: Chain) -> None:
        is_followed = chain in self.observations.chains
        for number, name in enumerate(chain.opening):
            segments = chain.segments[number] if chain.segments else (self.layers[name].num_outputs,)
            self.splits[name] = Split(style="colwise", gathers_output=False, segments=segments if is_followed else ())
        for name in chain.closing:
            self.splits[name] = Split(style="rowwise", splits_input=False)
        for name in chain.local:
            self.splits[name] = Split(style="local")

    # By the user

    def as_user_says(self, plan: Mapping[str, str]) -> TensorPlan:
        styles = styles_of(self.module, plan, self.layers)
        for name, (style, pattern) in styles.items():
            self._check(name, style, pattern)
            self.splits[name] = Split(style=style)  # type: ignore[arg-type]  # checked
        for tie in self.ties:
            self._check_tie(tie)
        attentions, _ = attention_chains(
            self.module, self.library, self.layers, self.observations, self.whole | self._tied()
        )
        for chain in (*attentions, *self.observations.chains):
            opens = all(name in styles and styles[name][0] == "colwise" for name in chain.opening)
            closes = all(name in styles and styles[name][0] == "rowwise" for name in chain.closing)
            if opens and closes and (chain not in attentions or self._have_even_heads(chain)):
                self._add_chain(chain)
        for name in self.layers:
            if name not in self.splits:
                self.whole.setdefault(name, "the plan does not name it")
        return self._plan()

    def _have_even_heads(self, chain: Chain) -> bool:
        try:
            check_heads(self.module, chain, self.num_ranks, self.observations, self.layers)
        except ConfigurationError:
            return False
        return True

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
        size, what = (
            (layer.num_inputs, "input features")
            if style == "rowwise"
            else (layer.num_outputs, "rows" if layer.kind == "embedding" else "output features")
        )
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
        is_same = len(named) == len(tie.layers) and all(self.splits[name].style == "vocab" for name in named)
        if not (is_same and tie.allows_vocab(self.layers)):
            raise ConfigurationError(
                f"plan: {named[0]} cannot be split as planned, because a parameter is shared by "
                f"{', '.join((*tie.layers, *tie.others))}. Split all of these as 'vocab', or none of them."
            )

    # Both

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


def why_gathered(module: Module, plan: TensorPlan, observations: Observations) -> dict[str, str]:
    """Return why layers that are split gather their output, as far as it is known."""
    reasons: dict[str, Any] = {}
    _, attentions = attention_chains(module, library_plan(module), layers_of(module), observations, plan.whole)
    for name, split in plan.splits.items():
        if split.style == "colwise" and split.gathers_output:
            found = attentions.get(name) or observations.reason or observations.leaks.get(name)
            if found:
                reasons[name] = found
    return reasons
