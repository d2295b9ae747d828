"""The graph by which torch computes gradients."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def node_of(value: Any) -> Any:
    """Return the node of `value`: a tensor that requires gradients, a `GradientEdge`, or a node.

    Inside a transform of `torch.func`, a leaf from outside of it has none: return `None`.
    """
    if not isinstance(value, Tensor):
        return getattr(value, "node", value)
    if value.grad_fn is not None:
        return value.grad_fn
    try:
        return get_gradient_edge(value).node
    except AttributeError:
        return None


def nodes_of(values: Iterable[Any]) -> set[Any]:
    """Return all nodes of the graphs of `values`, down to the leaves."""
    found: set[Any] = set()
    remaining = [node_of(each) for each in values]
    while remaining:
        node = remaining.pop()
        if node is not None and node not in found:
            found.add(node)
            remaining += [following for following, _ in node.next_functions]
    return found
