"""Refuse gradients that the code of a step computes itself, if they would have to pass through other stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from lightning_paral.compat.torch.autograd import check_backward_passes
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.engines.pipeline.elsewhere import is_elsewhere
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Unit

THROUGH_STAGES = (
    "The code of a step computes gradients itself, such as by torch.autograd.grad or backward(), which may have to "
    "pass through units of an earlier stage. In a pipeline, each stage has the graph of its own units only, and the "
    "backward passes run after the step. A step can compute gradients by what the last unit returns, and by weights "
    "that are used after it only. For others, train with paral_ddp, or with paral_fsdp if they are not differentiated "
    "again."
)
_DEPTH = 3
"""How deep tensors are searched for in objects that are no lists, tuples or dicts."""


class EarlierStages:
    """What goes into the units of earlier stages in one forward pass, and what comes out of them.

    Args:
        units: the units of earlier stages.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._into: set[Any] = set()
        self._out_of: set[Any] = set()

    def enter(self, values: Any) -> None:
        """Note what the code of this stage gives to a unit of an earlier stage, or to a module of `first_stage`."""
        self._into |= {_node_of(tensor) for tensor in _tensors_with_gradients(values)}

    def leave(self, values: Any) -> None:
        """Note what this stage has received from the stage before."""
        self._out_of |= {_node_of(tensor) for tensor in _tensors_with_gradients(values)}

    def clear(self) -> None:
        """Forget the pass."""
        self._into, self._out_of = set(), set()

    def may_be_part_of(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Return whether gradients of `outputs` by `inputs` could pass through units of earlier stages.

        They could not if the outputs do not depend on what these units return, if the inputs themselves depend on it,
        or if the inputs are weights that the code before these units does not use.

        Args:
            outputs: tensors or `GradientEdge`s.
            inputs: tensors or `GradientEdge`s.
        """
        if not inputs or not self._out_of & _nodes_of(outputs):
            return False
        before = _nodes_of(self._into)
        held = {id(parameter) for unit in self._units for parameter in unit.module.parameters()}
        for each in inputs:
            if isinstance(each, Tensor) and is_elsewhere(each):
                return True
            is_used_before = not isinstance(each, Parameter) or id(each) in held or _node_of(each) in before
            if is_used_before and not self._out_of & _nodes_of([each]):
                return True
        return False


def refuse_gradients_through_stages(is_in_step: Callable[[], bool], earlier: EarlierStages) -> Callable[[], None]:
    """Raise a `ConfigurationError` if code of a step computes such gradients; return a function that undoes this.

    Args:
        is_in_step: returns whether the code of a step is running, and not a backward pass of the pipeline.
        earlier: what goes into units of earlier stages in the running forward pass.
    """

    def check(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if is_in_step() and earlier.may_be_part_of(outputs, inputs):
            raise ConfigurationError(THROUGH_STAGES)

    return check_backward_passes(check)


def _tensors_with_gradients(values: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                yield leaf
        elif depth and hasattr(leaf, "__dict__"):  # such as a dataclass
            yield from _tensors_with_gradients(list(vars(leaf).values()), depth - 1)


def _node_of(value: Any) -> Any:
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


def _nodes_of(values: Iterable[Any]) -> set[Any]:
    """Return all nodes of the graphs of `values`, down to the leaves."""
    found: set[Any] = set()
    remaining = [_node_of(each) for each in values]
    while remaining:
        node = remaining.pop()
        if node is not None and node not in found:
            found.add(node)
            remaining += [following for following, _ in node.next_functions]
    return found
