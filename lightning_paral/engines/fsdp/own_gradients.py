"""Refuse gradients by sharded weights that the code of a step computes itself."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.compat.torch.autograd import check_backward_passes
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.gradient_graph import node_of, nodes_of


def refuse_gradients_by_shards(module: Module) -> Callable[[], None]:
    """Raise a `ConfigurationError` for `torch.autograd.grad` by weights that are not in the graph because of sharding.

    The graph has the unsharded weights of a unit. For the shards, torch would raise an error that does not say so, or
    return `None` with `allow_unused=True`.

    Returns:
        Callable[[], None]: a function that undoes this.
    """

    def check(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        shards = {id(each) for each in inputs if isinstance(each, DTensor) and each.requires_grad}
        if not shards:
            return
        nodes = nodes_of(outputs)
        for name, parameter in module.named_parameters():
            if id(parameter) in shards and node_of(parameter) not in nodes:
                raise ConfigurationError(
                    f"The gradient by {name} was computed, as by torch.autograd.grad, but this weight is sharded: the "
                    "step computes with the unsharded weight of its unit. Only gradients by inputs and by weights "
                    "outside of units can be computed in a step. Read others after the backward pass, with "
                    "trainer.strategy.full_gradient(parameter), or train with paral_ddp."
                )

    return check_backward_passes(check)
