"""The layers of a module that can be split, those that share parameters, and why others cannot be split."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import DTensor
from torch.nn import Embedding, Linear, Module, MultiheadAttention, Parameter, TransformerEncoderLayer
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_paral.compat.torch.modules import ALL, FORWARD, hooks_in, own_parameters


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer or an embedding."""

    name: str
    kind: str
    """`"linear"` or `"embedding"`."""
    num_inputs: int
    """Input features; of an embedding, the features of a row."""
    num_outputs: int
    """Output features; of an embedding, the rows."""
    is_transposed: bool = False
    """Whether the weight has the shape `[in, out]`, as in transformers' `Conv1D`."""

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.num_inputs * self.num_outputs


def layers_of(module: Module) -> dict[str, Layer]:
    """Return all linear layers and embeddings of `module` by name, also those that cannot be split."""
    layers = {}
    for name, part in module.named_modules():
        layer = _layer(name, part)
        if layer is not None:
            layers[name] = layer
    return layers


def _layer(name: str, part: Module) -> Layer | None:
    if isinstance(part, Linear):
        return Layer(name=name, kind="linear", num_inputs=part.in_features, num_outputs=part.out_features)
    if isinstance(part, Embedding):
        return Layer(name=name, kind="embedding", num_inputs=part.embedding_dim, num_outputs=part.num_embeddings)
    weight = own_parameters(part).get("weight")
    if is_conv1d(part) and weight is not None and weight.dim() == 2:
        return Layer(
            name=name, kind="linear", num_inputs=weight.shape[0], num_outputs=weight.shape[1], is_transposed=True
        )
    return None


def is_conv1d(part: Module) -> bool:
    """Return whether `part` is a `Conv1D` of transformers, or of a subclass. It does not import transformers."""
    return any(_is_conv1d_class(each) for each in type(part).__mro__)


def _is_conv1d_class(each: type) -> bool:
    return each.__name__ == "Conv1D" and each.__module__.startswith("transformers.")


def refusals(module: Module, layers: Mapping[str, Layer]) -> dict[str, str]:
    """Return why each layer that cannot be split stays whole, by name. Tied weights are not considered.

    Args:
        module: the module of the run, not a copy on fake tensors, since the kinds of its parameters count.
        layers: of `layers_of(module)`.
    """
    parts = dict(module.named_modules())
    reasons = {}
    for name, layer in layers.items():
        parent = parts[name.rpartition(".")[0]] if name else None
        reason = _refusal(parts[name], layer, parent)
        if reason is not None:
            reasons[name] = reason
    return reasons


def _refusal(part: Module, layer: Layer, parent: Module | None) -> str | None:
    if any(is_lazy(parameter) for parameter in part.parameters(recurse=False)):
        return "its shape is not known before the first forward pass"
    if parametrize.is_parametrized(part):
        return "it has parametrizations"
    if not _has_own_forward_of_torch(part):
        return f"its class, {type(part).__name__}, has its own forward"
    own = {name: parameter for name, parameter in own_parameters(part).items() if parameter is not None}
    if not {"weight"} <= set(own) <= {"weight", "bias"}:
        return "its weight is computed from other parameters"
    for name, parameter in own.items():
        if isinstance(parameter, DTensor):
            return f"its {name} is a DTensor already"
        if type(parameter) is not Parameter:
            return f"its {name} is a {type(parameter).__name__}"
    if tuple(own["weight"].shape) != _shape(layer):
        return f"its weight has the shape {list(own['weight'].shape)}, not {list(_shape(layer))}"
    if isinstance(part, Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(part, option):
                return f"it is an embedding with {option}={getattr(part, option)}"
    if any(hooks_in(part, table) for table in ALL if table not in FORWARD):
        return "a hook sees the gradients of its inputs"
    if isinstance(parent, MultiheadAttention):
        return "nn.MultiheadAttention uses its weight directly"
    if isinstance(parent, TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer uses its weight directly when it evaluates"
    return None


def _has_own_forward_of_torch(part: Module) -> bool:
    if "forward" in vars(part):
        return False
    if isinstance(part, Linear):
        return type(part).forward is Linear.forward
    if isinstance(part, Embedding):
        return type(part).forward is Embedding.forward
    return any(
        _is_conv1d_class(each) and type(part).forward is vars(each).get("forward") for each in type(part).__mro__
    )


def _shape(layer: Layer) -> tuple[int, int]:
    return (layer.num_inputs, layer.num_outputs) if layer.is_transposed else (layer.num_outputs, layer.num_inputs)


def shared_parameters(module: Module, layers: Mapping[str, Layer]) -> list[dict[str, str]]:
    """Return the owners of each parameter that several have, one of them a layer: the attribute of each by its name.

    An owner that is no layer has the name of its parameter.
    """
    owners: dict[int, dict[str, str]] = {}
    for name, part in module.named_modules():
        for attribute, parameter in own_parameters(part).items():
            if parameter is not None:
                owner = name if name in layers else f"{name}.{attribute}".lstrip(".")
                owners.setdefault(id(parameter), {})[owner] = attribute
    return [found for found in owners.values() if len(found) > 1 and not layers.keys().isdisjoint(found)]
