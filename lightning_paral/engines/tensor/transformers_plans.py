"""The plans that models of transformers carry: which layers of an attention can be split by heads.

Only `tp_plan` is read, from transformers 5 on. The library's own code for tensor parallelism is not used.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Module

from lightning_paral.compat.torch.modules import ALL, hooks_in
from lightning_paral.engines.tensor.candidates import Layer
from lightning_paral.engines.tensor.shapes import Chain
from lightning_paral.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class LibraryPlan:
    """The plan of a model of transformers, by names in the whole module."""

    styles: Mapping[str, str]
    """The library's style of each submodule that its plan names."""
    models: Mapping[str, Module]
    """The models that have a plan."""

    @property
    def vocabulary(self) -> frozenset[str]:
        """Embeddings and output heads that the plan splits."""
        heads = {f"{name}.lm_head".lstrip(".") for name in self.models}
        found = {name for name, style in self.styles.items() if style == "embedding_rowwise"}
        return frozenset(
            found | {name for name, style in self.styles.items() if style == "colwise_gather_output" and name in heads}
        )


def library_plan(module: Module) -> LibraryPlan:
    """Return the plans of all models of transformers in `module`. It does not import transformers."""
    styles: dict[str, str] = {}
    models: dict[str, Module] = {}
    for name, part in module.named_modules():
        if any(name == model or name.startswith(f"{model}." if model else "") for model in models):
            continue
        plan = getattr(part, "tp_plan", None) if _is_pretrained_model(part) else None
        if not plan or not isinstance(plan, Mapping):
            continue
        models[name] = part
        for inner, _ in part.named_modules():
            # The longest pattern is the most specific one.
            found = [pattern for pattern in plan if fnmatch.fnmatchcase(inner, pattern)]
            found = [pattern for pattern in found if pattern.count(".") == inner.count(".")]
            if inner and found:
                styles[f"{name}.{inner}".lstrip(".")] = str(plan[max(found, key=len)])
    return LibraryPlan(styles=styles, models=models)


def _is_pretrained_model(part: Module) -> bool:
    return any(
        each.__name__ == "PreTrainedModel" and each.__module__ == "transformers.modeling_utils"
        for each in type(part).__mro__
    )


def library_chains(
    module: Module, plan: LibraryPlan, layers: Mapping[str, Layer], whole: Mapping[str, str]
) -> list[Chain]:
    """Return the layers between which transformers plans to split activations, by heads in an attention.

    Args:
        module: the module.
        plan: of `library_plan(module)`.
        layers: of `layers_of(module)`.
        whole: layers that cannot be split.
    """
    parts = dict(module.named_modules())
    chains: list[Chain] = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.styles.items() if style == "rowwise"):
        inside = {name: style for name, style in plan.styles.items() if name.startswith(f"{parent}.")}
        opening = tuple(name for name, style in inside.items() if style == "colwise")
        closing = tuple(name for name, style in inside.items() if style == "rowwise")
        local = tuple(name for name, style in inside.items() if style == "replicated_with_grad_allreduce")
        is_known = len(opening) + len(closing) + len(local) == len(inside) and opening and len(closing) == 1
        are_linear = all(name in layers and name not in whole for name in (*opening, *closing))
        planned = {id(parameter) for name in inside for parameter in parts[name].parameters()}
        is_complete = planned.issuperset(id(parameter) for parameter in parts[parent].parameters())
        # Hooks would see ordinary tensors, with the features of the rank.
        has_hooks = any(hooks_in(part, table) for name in inside for part in parts[name].modules() for table in ALL)
        if is_known and are_linear and is_complete and not has_hooks:
            chains.append(Chain(opening=opening, closing=closing, local=local))
    return chains


def head_counts(module: Module, chain: Chain) -> dict[str, int]:
    """Return the numbers of heads of an attention, by name; none if the parent of `chain` is no attention."""
    parent = module.get_submodule(chain.closing[0].rpartition(".")[0])
    if not any(hasattr(parent, name) for name in ("head_dim", "head_size", "num_key_value_groups")):
        return {}
    config = getattr(parent, "config", None)
    counts = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def check_heads(module: Module, chain: Chain, num_ranks: int) -> None:
    """Raise a `ConfigurationError` if the ranks cannot have the same number of heads of an attention."""
    counts = head_counts(module, chain)
    if all(count % num_ranks == 0 for count in counts.values()):
        return
    fitting = [str(n) for n in range(1, min(counts.values()) + 1) if all(c % n == 0 for c in counts.values())]
    told = ", ".join(f"{name}={value}" for name, value in counts.items())
    raise ConfigurationError(
        f"tensor_parallel={num_ranks} does not divide the heads of {chain.closing[0].rpartition('.')[0]}, which has "
        f"{told}. These numbers of ranks do: {', '.join(fitting)}. With a plan of your own, its activations are "
        "gathered, and any number works that divides the features of its layers."
    )
