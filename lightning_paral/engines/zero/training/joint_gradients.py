"""Join the gradients of several engines: with several optimizers, each has its own engine."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.engines.zero.training.gradients import GradientsNotReadyError, PartitionedGradients
from lightning_paral.engines.zero.training.users_optimizer import optimizer_index
from lightning_paral.errors import ConfigurationError


class JointGradients:
    """The gradients of one fit with several optimizers.

    A backward pass may reach the parameters of all optimizers, or of some. Each optimizer has its own windows: the
    backward passes that reached its parameters since its last step, or since its gradients were zeroed.

    Args:
        gradients: the gradients of each engine.
        optimizers: the user's optimizers, in the same order.
    """

    def __init__(self, gradients: Sequence[PartitionedGradients], optimizers: Sequence[Any]) -> None:
        self._all = list(gradients)
        self._optimizers = list(optimizers)

    @property
    def per_optimizer(self) -> list[PartitionedGradients]:
        """The gradients of each optimizer."""
        return list(self._all)

    def of(self, optimizer: Any) -> PartitionedGradients:
        """Return the gradients of `optimizer`, one of the user's optimizers."""
        return self._all[optimizer_index(optimizer, self._optimizers)]

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Run one backward pass, after which each rank has its shards of the gradients. *Collective* over the world.

        Args:
            loss: the user's loss, not scaled.
            run: a function that runs the backward pass of the scaled loss.
        """
        optimizer: Any = self._all[0].engine.optimizer  # all share one scale: see `ZeROPrecision.start_fit`
        scaled = optimizer.loss_scaler.scale_loss(loss) if optimizer.needs_scaler() else loss
        for gradients in self._all:
            gradients.before_shared_backward()
        run(scaled)
        for gradients in self._all:
            gradients.after_shared_backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop those gradients of all optimizers that no step has used yet."""
        for gradients in self._all:
            gradients.zero_grad(set_to_none)

    def end(self) -> None:
        """Stop recording which parameters get gradients."""
        for gradients in self._all:
            gradients.end()

    # Reading

    def norm(self) -> Tensor:
        """Return the 2-norm of the gradients of all optimizers before clipping: a scalar, fp32. *Collective*.

        Optimizers without gradients are skipped.

        Raises:
            GradientsNotReadyError: no optimizer has gradients.
        """
        norms = [gradients.norm() for gradients in self._all if gradients.has_gradients]
        if not norms:
            raise GradientsNotReadyError(
                "No optimizer has gradients now: they exist from a backward pass to the step. Read them between "
                "self.manual_backward(...) and optimizer.step()."
            )
        return torch.stack(norms).square().sum().sqrt()

    def full(self, parameter: Parameter) -> Tensor | None:
        """Return the full averaged gradient of `parameter` in fp32; `None` if it is frozen. *Collective*.

        Raises:
            ConfigurationError: no optimizer trains the parameter.
        """
        for gradients in self._all:
            if gradients.covers(parameter):
                return gradients.full(parameter)
        if not parameter.requires_grad:
            return None
        raise ConfigurationError(
            "The gradient of a parameter was read, but no optimizer trains that parameter. ZeRO keeps gradients of "
            "trained parameters only: give the parameter to an optimizer in configure_optimizers."
        )


Gradients: TypeAlias = PartitionedGradients | JointGradients
"""The gradients of one fit, with one optimizer or several."""


def join_gradients(gradients: Sequence[PartitionedGradients], optimizers: Sequence[Any]) -> Gradients:
    """Return the gradients of all engines as one object; `gradients[i]` belongs to `optimizers[i]`."""
    return gradients[0] if len(gradients) == 1 else JointGradients(gradients, optimizers)
