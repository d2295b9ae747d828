"""Refuse gradients that the code of a step computes itself, if they would have to pass through other stages."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_paral.compat.torch.derivatives import check_backward_passes
from lightning_paral.compat.torch.pytree import tree_leaves
from lightning_paral.engines.pipeline.elsewhere import is_elsewhere
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.gradient_graph import node_of, nodes_of

THROUGH_STAGES = (
    "The code of a step computes gradients itself, such as by torch.autograd.grad or backward(), and they depend on "
    "units of an earlier stage. In a pipeline, each stage has the graph of its own units only, and the backward passes "
    "run after the step. Train with paral_ddp, or with paral_fsdp if they are not differentiated again."
)


class PassedOn:
    """The tensors of one forward pass that go into units of earlier stages, and those that come out of them."""

    def __init__(self) -> None:
        self._into: list[Tensor] = []
        self._out_of: list[Tensor] = []

    def enter(self, values: Any) -> None:
        """Note what the code of this stage gives to a unit of an earlier stage."""
        self._into += _tensors_with_gradients(values)

    def leave(self, values: Any) -> None:
        """Note what this stage has received from the stage before."""
        self._out_of += _tensors_with_gradients(values)

    def clear(self) -> None:
        """Forget the tensors, at the end of the pass."""
        self._into, self._out_of = [], []

    def carries(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Return whether gradients of `outputs` by `inputs` would have to pass through units of earlier stages.

        Args:
            outputs: tensors or `GradientEdge`s.
            inputs: tensors or `GradientEdge`s.
        """
        if any(isinstance(each, Tensor) and is_elsewhere(each) for each in inputs):
            return True
        if not self._out_of or not inputs:
            return False
        behind = nodes_of(outputs)
        before = nodes_of(self._into)
        return any(node_of(each) in behind for each in self._out_of) and any(node_of(each) in before for each in inputs)


def refuse_gradients_through_stages(is_in_step: Callable[[], bool], passed_on: PassedOn) -> Callable[[], None]:
    """Raise a `ConfigurationError` if code of a step computes such gradients; return a function that undoes this.

    Args:
        is_in_step: returns whether the code of a step is running, and not a backward pass of the pipeline.
        passed_on: what goes into units of earlier stages in the running forward pass.
    """

    def check(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if is_in_step() and passed_on.carries(outputs, inputs):
            raise ConfigurationError(THROUGH_STAGES)

    return check_backward_passes(check)


def _tensors_with_gradients(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
