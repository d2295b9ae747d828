"""The plain shapes of layers between which activations stay split: feed-forward networks and attentions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn import Module, ModuleDict, ModuleList

from lightning_paral.engines.tensor.candidates import Layer


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Layers between which activations can stay split."""

    opening: tuple[str, ...]
    """Linear layers that split their output features."""
    closing: tuple[str, ...]
    """Linear layers that split their input features, which are made from the outputs of the opening ones."""

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that are split."""
        return self.opening + self.closing


def plain_chains(module: Module, layers: Mapping[str, Layer]) -> list[Chain]:
    """Return the layers that have the shapes of a feed-forward network or an attention, by their sizes and order.

    One to three linear layers lead from the width of the block to an inner width, and the next one leads back. They are
    neighbours in one module, or all linear layers inside of one, apart from those in other chains. If the code uses
    them in another way, activations are gathered: the results are the same, but more is sent.

    Args:
        module: the module.
        layers: of `layers_of(module)`.
    """
    names = {part: name for name, part in reversed(list(module.named_modules()))}
    found: list[Chain] = []
    rest: dict[Module, list[str]] = {}
    for part in names:  # modules after those that they contain
        pool: list[str] = []
        for child in part.children():
            if names[child] in layers:
                if layers[names[child]].kind == "linear":
                    pool.append(names[child])
            elif not isinstance(child, ModuleList | ModuleDict):
                pool += rest.get(child, [])  # none of one that another module before has as well
        rest[part] = pool
        for chain in _matches(pool, layers, calls_in_order=isinstance(part, nn.Sequential)):
            found.append(chain)
            rest[part] = [name for name in rest[part] if name not in chain.layers]
    return found


def _matches(pool: Sequence[str], layers: Mapping[str, Layer], *, calls_in_order: bool) -> Iterator[Chain]:
    """Yield the chains among the linear layers of a module, in their order."""
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
                yield Chain(opening=found[:-1], closing=found[-1:])
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
    width, inner = closing.num_outputs, closing.num_inputs
    inputs = {layer.num_inputs for layer in opening}
    sizes = sorted(layer.num_outputs for layer in opening)
    is_square = inner == width
    if inputs != {width} and not (width in inputs and is_square and len(inputs) == 2):
        return False  # of an attention, keys and values may have another input
    match sizes:
        case [size] if size == inner:
            return is_all or not is_square
        case [size]:  # a gate as well, or queries, keys and values
            return _are_heads(size - inner, inner)
        case [first, second] if first == second:  # with a gate
            return first == inner and not is_square
        case [_, _]:  # queries; keys and values
            return inner in sizes and _are_heads(sum(sizes) - inner, inner)
        case [keys, values, queries]:
            return keys == values and queries == inner and _are_heads(2 * keys, inner)
    return False


def _are_heads(size: int, inner: int) -> bool:
    """Return whether `size` features may be keys and values for `inner` features of queries."""
    return size > 0 and size % 2 == 0 and inner % (size // 2) == 0
