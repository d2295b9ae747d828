"""The layers of a module that can be split, why others cannot, and the plain shapes that they have together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Embedding, Linear, Module, Parameter

from lightning_paral.compat.torch.modules import ALL, FORWARD, hooks_in, own_parameters


@dataclass(frozen=True)
class Layer:
    """A linear layer or an embedding."""

    num_inputs: int
    """Input features; of an embedding, the features of a row."""
    num_outputs: int
    """Output features; of an embedding, the rows."""
    is_embedding: bool
    is_transposed: bool
    """Whether the weight has the shape `[in, out]`, as in transformers' `Conv1D`."""


def layers_of(module: Module) -> dict[str, Layer]:
    """Return all linear layers and embeddings of `module` by name, also those that cannot be split."""
    layers = {}
    for name, part in module.named_modules():
        match part:
            case Linear():
                inputs, outputs = part.in_features, part.out_features
            case Embedding():
                inputs, outputs = part.embedding_dim, part.num_embeddings
            case _ if is_conv1d(part) and isinstance(part.weight, Tensor) and part.weight.dim() == 2:
                inputs, outputs = part.weight.shape
            case _:
                continue
        layers[name] = Layer(inputs, outputs, isinstance(part, Embedding), is_conv1d(part))
    return layers


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
    found = {name: _refusal(parts[name], layer, parts[name.rpartition(".")[0]]) for name, layer in layers.items()}
    return {name: reason for name, reason in found.items() if reason is not None}


def _refusal(part: Module, layer: Layer, parent: Module) -> str | None:
    base: Any = next(each for each in type(part).__mro__ if each in (Linear, Embedding) or _is_conv1d_class(each))
    if "forward" in vars(part) or type(part).forward is not base.forward:
        return f"its class, {type(part).__name__}, has its own forward"
    own = {name: parameter for name, parameter in own_parameters(part).items() if parameter is not None}
    if not {"weight"} <= set(own) <= {"weight", "bias"}:
        return "its weight is computed from other parameters"
    for name, parameter in own.items():
        if type(parameter) is not Parameter:
            return f"its {name} is a {type(parameter).__name__}"
    shape = [layer.num_inputs, layer.num_outputs] if layer.is_transposed else [layer.num_outputs, layer.num_inputs]
    if [*own["weight"].shape] != shape:
        return f"its weight has the shape {[*own['weight'].shape]}, not {shape}"
    for option in ("max_norm", "scale_grad_by_freq", "sparse") if layer.is_embedding else ():
        if getattr(part, option):
            return f"it is an embedding with {option}={getattr(part, option)}"
    if any(hooks_in(part, table) for table in ALL if table not in FORWARD):
        return "a hook sees the gradients of its inputs"
    if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return f"{type(parent).__name__} may use its weight directly"
    return None


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


# The plain shapes, between whose layers activations stay split: feed-forward networks and attentions


def plain_chains(module: Module, layers: Mapping[str, Layer]) -> list[dict[str, str]]:
    """Return the layers that have the shapes of a feed-forward network or an attention, by their sizes and order.

    One to three linear layers lead from the width of the block to an inner width, and the next one leads back. They are
    neighbours in one module, or all linear layers inside of one, apart from those in other chains. If the code uses
    them in another way, activations are gathered: the results are the same, but more is sent.

    Args:
        module: the module.
        layers: of `layers_of(module)`.

    Returns:
        The styles of the layers of each: the last one is split by its inputs, and the others by their outputs.
    """
    names = {part: name for name, part in reversed(list(module.named_modules()))}
    found: list[dict[str, str]] = []
    rest: dict[Module, list[str]] = {}
    for part in names:  # modules after those that they contain
        pool: list[str] = []
        for child in part.children():
            if names[child] in layers:
                if not layers[names[child]].is_embedding:
                    pool.append(names[child])
            elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
                pool += rest.get(child, [])  # none of one that another module before has as well
        rest[part] = pool
        for chain in _matches(pool, layers, calls_in_order=isinstance(part, nn.Sequential)):
            *opening, closing = chain
            found.append({**dict.fromkeys(opening, "colwise"), closing: "rowwise"})
            rest[part] = [name for name in rest[part] if name not in chain]
    return found


def _matches(pool: Sequence[str], layers: Mapping[str, Layer], *, calls_in_order: bool) -> Iterator[tuple[str, ...]]:
    """Yield the chains among the linear layers of a module, in their order, and the closing layer last."""
    start = 0
    while start < len(pool):
        for size in (4, 3, 2):
            names = tuple(pool[start : start + size])
            are_neighbours = len({name.rpartition(".")[0] for name in names}) == 1
            is_all = size == len(pool)
            if len(names) < size or not (are_neighbours or is_all):
                continue
            orders = [names]
            if size == 3 and not calls_in_order:
                orders.append((names[0], names[2], names[1]))  # Llama's w1, w2 and w3, of which w3 is the gate
            found = next((each for each in orders if _is_plain([layers[name] for name in each], is_all)), None)
            if found is not None:
                yield found
                start += size
                break
        else:
            start += 1


def _is_plain(layers: Sequence[Layer], is_all: bool) -> bool:
    """Return whether the sizes of linear layers, in order, are those of a feed-forward network or an attention.

    Args:
        layers: the layers.
        is_all: whether their module has no others. Two square layers may be queries and keys otherwise.
    """
    *opening, closing = layers
    width, inner, is_square = closing.num_outputs, closing.num_inputs, closing.num_inputs == closing.num_outputs
    inputs, sizes = {layer.num_inputs for layer in opening}, [layer.num_outputs for layer in opening]
    if inputs != {width} and not (width in inputs and is_square and len(inputs) == 2):
        return False  # of an attention, keys and values may have another input
    if sizes == [inner]:
        return is_all or not is_square
    if len(sizes) > 1 and (inner not in sizes or len({*sizes}) > 2 or sizes == [width, width]):
        return False
    # A gate is as large as the inner features. Keys and values may have fewer heads than queries have.
    rest = sum(sizes) - inner
    return rest > 0 and rest % 2 == 0 and inner % (rest // 2) == 0
