"""The plans that models of transformers carry: which layers of an attention can be split by heads.

Only `tp_plan` is read, from transformers 5 on. The library's own code for tensor parallelism is not used.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from lightning_paral.engines.tensor.planner.candidates import Layer
from lightning_paral.engines.tensor.planner.observations import Chain, Observations
from lightning_paral.errors import ConfigurationError

_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "local_params")


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

    @property
    def experts(self) -> tuple[str, ...]:
        """Modules whose layers are not called one by one."""
        return tuple(name for name, style in self.styles.items() if style in _EXPERTS)


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


def attention_chains(
    module: Module,
    plan: LibraryPlan,
    layers: Mapping[str, Layer],
    observations: Observations,
    whole: Mapping[str, str],
) -> tuple[list[Chain], dict[str, str]]:
    """Return the attentions that compute each head separately, and why the layers of others gather their output.

    The plan of the library says so, and the observations that the code infers the number of heads: each projection is
    only viewed as `[..., -1, size of a head]`, and nothing uses the attention weights that the attention returns.

    Args:
        module: the module.
        plan: of `library_plan(module)`.
        layers: of `layers_of(module)`.
        observations: of a step.
        whole: layers that cannot be split.
    """
    parts = dict(module.named_modules())
    chains: list[Chain] = []
    reasons: dict[str, str] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.styles.items() if style == "rowwise"):
        inside = {name: style for name, style in plan.styles.items() if name.startswith(f"{parent}.")}
        opening = tuple(name for name, style in inside.items() if style == "colwise")
        closing = tuple(name for name, style in inside.items() if style == "rowwise")
        if not any(hasattr(parts[parent], name) for name in ("head_dim", "head_size", "num_key_value_groups")):
            continue  # no attention; a feed-forward network needs no trust, since following it proves all
        local = tuple(name for name, style in inside.items() if style == "replicated_with_grad_allreduce")
        reason = _objection(parts, parent, inside, opening, closing, local, layers, observations, whole)
        if reason is None:
            chains.append(Chain(opening=opening, closing=closing, local=local, is_random=parent in observations.random))
        else:
            reasons |= dict.fromkeys((*opening, *closing), reason)
    return chains, reasons


def _objection(
    parts: Mapping[str, Module],
    parent: str,
    inside: Mapping[str, str],
    opening: tuple[str, ...],
    closing: tuple[str, ...],
    local: tuple[str, ...],
    layers: Mapping[str, Layer],
    observations: Observations,
    whole: Mapping[str, str],
) -> str | None:
    """Return why an attention does not compute each head separately, or is not known to."""
    known = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
    unknown = sorted(set(inside.values()) - known)
    if unknown:
        return f"transformers plans the style {unknown[0]!r} in {parent}"
    if observations.reason is not None:
        return observations.reason
    if len(closing) != 1 or not opening:
        return f"{parent} has no single output projection"
    for name in (*opening, *closing):
        if name not in layers or layers[name].kind != "linear" or name in whole:
            return whole.get(name) or f"{name} is no linear layer"
        if name in observations.used_directly:
            return f"the weight of {name} is used by {observations.used_directly[name]}"
    covered = {id(parameter) for name in inside for parameter in parts[name].parameters()}
    for name, parameter in parts[parent].named_parameters():
        if id(parameter) not in covered:
            return f"transformers does not plan {parent}.{name}"
    for name in opening:
        if name not in observations.head_sizes:
            return observations.leaks.get(name) or f"{name} was not seen to be divided into heads"
    if parent in observations.returns_heads:
        return f"what {parent} returns beside its output is used: {observations.returns_heads[parent]}"
    sizes = {observations.head_sizes[name] for name in opening}
    for name in local:
        for parameter in parts[name].parameters(recurse=False):
            if parameter.dim() != 1 or any(size % parameter.numel() for size in sizes):
                return f"{name} acts on several heads"
    return None


def check_heads(module: Module, chain: Chain, num_ranks: int, observations: Observations, layers: Any) -> None:
    """Raise a `ConfigurationError` if the ranks cannot have the same number of heads of an attention."""
    parts = dict(module.named_modules())
    parent = chain.closing[0].rpartition(".")[0]
    counts = {name: layers[name].num_outputs // observations.head_sizes[name] for name in chain.opening}
    config = getattr(parts[parent], "config", None)
    numbers = {
        name: value
        for name in ("num_attention_heads", "num_key_value_heads")
        if isinstance(value := getattr(config, name, None), int)
    }
    if all(count % num_ranks == 0 for count in (*counts.values(), *numbers.values())):
        return
    smallest = min((*counts.values(), *numbers.values()))
    fitting = [str(n) for n in range(1, smallest + 1) if all(c % n == 0 for c in (*counts.values(), *numbers.values()))]
    told = ", ".join(f"{name}={value}" for name, value in numbers.items()) or ", ".join(
        f"{count} heads of {name}" for name, count in counts.items()
    )
    raise ConfigurationError(
        f"tensor_parallel={num_ranks} does not divide the heads of {parent}, which has {told}. These numbers of ranks "
        f"do: {', '.join(fitting)}. With a plan of your own, these layers gather their output, and any number works "
        "that divides their features."
    )
