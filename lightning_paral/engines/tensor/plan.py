"""Which layers are split over the tensor ranks, and how; plans that users write; and what a plan means in bytes."""

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Embedding, Module

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.tensor.shapes import Layer, is_conv1d, layers_of, plain_chains, refusals, shared_parameters
from lightning_paral.errors import ConfigurationError
from lightning_paral.text import did_you_mean, make_console, make_table, nearest_names

STYLES: dict[str, str] = {
    "colwise": "split the output features of a linear layer",
    "rowwise": "split the input features of a linear layer",
    "vocab": "split the rows of an embedding, or the classes that a linear layer computes for a loss",
}
"""How a layer can be split.

Whatever the code around it does, the layer gives the results of the whole layer: a colwise layer returns a tensor of
which each rank has a part, which is gathered where a function needs all of it, and a rowwise layer divides an input
that is not split.
"""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The layers of a module that are split, and those that are not."""

    splits: Mapping[str, str]
    """The style by the name of the layer in the module."""

    whole: Mapping[str, str]
    """The reason by the name of each layer with parameters that stays whole on every rank."""


def check_plan(plan: Any) -> None:
    """Raise a `ConfigurationError` if `plan` is neither `"auto"` nor styles by patterns."""
    if plan == "auto":
        return
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(pattern, str) for pattern in plan):
        raise ConfigurationError(
            f'plan={plan!r} has to be "auto", or a dict with names of layers, for example '
            "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise', 'head': 'vocab'}."
        )
    for pattern, style in plan.items():
        if style not in STYLES:
            known = "; ".join(f"{name!r}: {what}" for name, what in STYLES.items())
            raise ConfigurationError(f"plan {pattern!r}: {style!r} is no style. The styles are {known}.")


def styles_of(module: Module, plan: Mapping[str, str], layers: Mapping[str, Layer]) -> dict[str, tuple[str, str]]:
    """Return the style of each layer that `plan` names, and the pattern that names it.

    Raises:
        ConfigurationError: a pattern names no layer, or something else than layers that can be split; or two patterns
            give a layer different styles.
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in plan.items():
        matching = (each for each in module.named_modules() if each[0] and fnmatch.fnmatchcase(each[0], pattern))
        named = {name: part for name, part in matching if name in layers or own_parameters(part)}
        if not named:
            names = dict.fromkeys(map(folded, layers))
            known_names = nearest_names(pattern, [*layers, *names])
            hint = did_you_mean(known_names, quoted=True) or f"The layers are {', '.join(names)}."
            raise ConfigurationError(f"plan {pattern!r} names no layer of {type(module).__name__}. {hint}")
        for name, part in named.items():
            if name not in layers:
                raise ConfigurationError(
                    f"plan {pattern!r}: {name} is a {type(part).__name__}, which cannot be split. Only nn.Linear, "
                    "nn.Embedding and Conv1D of transformers can."
                )
            known, other = found.setdefault(name, (style, pattern))
            if known != style:
                raise ConfigurationError(f"plan: {name} is {known!r} by {other!r}, and {style!r} by {pattern!r}.")
    return found


def folded(name: str) -> str:
    """Return `name` with a star in place of each number: `blocks.*.up` for `blocks.3.up`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# Decide how each layer is split

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
        rows = {layer.num_outputs for layer in self.layers.values() if layer.is_embedding}
        vocabulary = []
        for name, layer in self.layers.items():
            is_small = layer.num_outputs < MIN_ROWS or self._leaves_a_rank_without(layer.num_outputs)
            if layer.is_embedding and is_small:
                self.refused.setdefault(name, f"it has only {layer.num_outputs} rows")
            is_head = layer.num_outputs in rows and not layer.is_transposed and not is_small
            if layer.is_embedding or is_head:
                vocabulary.append(name)
        sharing = {name: [each for each in owners if each in self.layers] for owners in self.shared for name in owners}
        embeddings = [name for name in vocabulary if name in sharing or self.layers[name].is_embedding]
        together = [dict.fromkeys(sharing.get(name, [name]), "vocab") for name in embeddings]
        together += [*plain_chains(self.module, self.layers), *({name: "vocab"} for name in vocabulary)]
        for styles in together:
            if self.splits.keys().isdisjoint(styles):
                self._split_all_or_none(styles)
        return self._plan("it is in no feed-forward network or attention of a plain shape")

    def _split_all_or_none(self, styles: Mapping[str, str]) -> None:
        reasons = {name: reason for name in styles if (reason := self._objection(name, styles))}
        if not reasons:
            self.splits |= styles
            return
        first, reason = next(iter(reasons.items()))
        for name in styles:
            self.whole.setdefault(name, reasons.get(name, f"{folded(first)} stays whole: {reason}"))

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
        size, what = layer.num_outputs, "rows" if layer.is_embedding else "output features"
        if style == "rowwise":
            size, what = layer.num_inputs, "input features"
        if name in self.refused:
            return self.refused[name]
        for owners in self.shared:
            rows = {self.layers[each].num_outputs for each in owners if each in self.layers}
            is_same = len(rows) == 1 and set(owners.values()) == {"weight"}
            if name in owners and not (is_same and all(styles.get(each) == "vocab" for each in owners)):
                return f"a parameter is shared by {', '.join(owners)}, which can only be split together, as 'vocab'"
        if style not in (None, "vocab") and layer.is_embedding:
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
        rest = [name for name in self.layers if name not in splits]
        whole = {name: self.whole.get(name) or self._objection(name, {}) or reason for name in rest}
        return TensorPlan(splits=splits, whole=whole)


def split_dims(layer: Module, style: str) -> dict[str, int]:
    """Return the dimension in which each parameter of `layer` is split, by name. The others stay whole."""
    if style == "whole":
        return {}
    if isinstance(layer, Embedding):
        return {"weight": 0}
    features = 1 if style == "rowwise" else 0
    dims = {"weight": 1 - features if is_conv1d(layer) else features}
    if features == 0 and own_parameters(layer).get("bias") is not None:
        dims["bias"] = 0
    return dims


# What a plan means


def report_of(module: Module, num_ranks: int, plan: TensorPlan) -> dict[str, Any]:
    """Return what a plan means for a module, as JSON.

    Returns:
        `module`, the name of its class; `tensor_parallel`, the number of ranks; and `layers`, a dict for all layers
        that are treated alike: their `name`, with stars in place of the numbers of blocks, their `count`, `style`, and
        the `reason` why they are `"whole"`.
    """
    kinds = Counter[tuple[str, str, str]]()
    for name, _ in module.named_modules():
        if name in plan.splits or name in plan.whole:
            block, _, last = name.rpartition(".")  # a number that ends a name is a position in a block
            kind = f"{folded(block)}.{last}" if folded(block) != block else folded(name)
            kinds[kind, plan.splits.get(name, "whole"), plan.whole.get(name, "")] += 1
    layers = [dict(zip(("name", "style", "reason"), kind, strict=True), count=kinds[kind]) for kind in kinds]
    return {"module": type(module).__name__, "tensor_parallel": num_ranks, "layers": layers}


def print_report(report: Mapping[str, Any]) -> None:
    """Print a row for each kind of layers, with why some stay whole. `report` is that of `report_of`."""
    from rich.markup import escape

    rows = [(escape(row["name"]), str(row["count"]), row["style"], escape(row["reason"])) for row in report["layers"]]
    console = make_console()
    console.print(f"How {report['tensor_parallel']} tensor ranks divide {report['module']}:")
    console.print(make_table(["layers", "number", "style", "because"], rows, left=(0, 2, 3)))
