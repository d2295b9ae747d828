"""What several engines hold, and their gradients, as if there were one: each optimizer has an engine of its own."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.engines.zero.gradients.partitioned import GradientsNotReadyError, PartitionedGradients
from lightning_paral.engines.zero.parameters.masterless import fill, held
from lightning_paral.engines.zero.state.checkpoint_state import ZeroCheckpointState
from lightning_paral.errors import ConfigurationError


def _number_of(optimizer: Any, optimizers: Sequence[Any]) -> int:
    """Return which of the user's `optimizers` is meant; it may be wrapped by Lightning.

    Raises:
        ConfigurationError: it is none of them.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for number, each in enumerate(optimizers):
        if each is optimizer:
            return number
    raise ConfigurationError(
        f"{type(optimizer).__name__} is none of the {len(optimizers)} optimizers that configure_optimizers returned. "
        "Use those of self.optimizers()."
    )


class JointCheckpointState:
    """What this rank holds of the parameters and the optimizers of several engines.

    Args:
        holdings: those of each engine.
        optimizers: the user's, in the same order.
    """

    def __init__(self, holdings: Sequence[ZeroCheckpointState], optimizers: Sequence[Any]) -> None:
        self._all = list(holdings)
        self._optimizers = list(optimizers)

    def of(self, optimizer: Any) -> ZeroCheckpointState:
        """Return what this rank holds of `optimizer`, one of the user's."""
        return self._all[_number_of(optimizer, self._optimizers)]

    def having(self, parameter: Parameter) -> ZeroCheckpointState | None:
        """Return what this rank holds of the optimizer that trains `parameter`."""
        return next((holdings for holdings in self._all if holdings.has(parameter)), None)

    def weight(self, parameter: Parameter) -> Tensor:
        """Return what this rank has of `parameter`: fp32 where a master copy exists."""
        holdings = self.having(parameter)
        return held(parameter) if holdings is None else holdings.weight(parameter)

    def fill(self, parameter: Parameter, stored: Tensor) -> bool:
        """Put a stored tensor into `parameter`; see `ZeroCheckpointState.fill`."""
        holdings = self.having(parameter)
        return fill(parameter, stored) if holdings is None else holdings.fill(parameter, stored)

    def write_masters(self) -> None:
        """Put the tensors of all calls of `fill` where they belong."""
        for holdings in self._all:
            holdings.write_masters()

    def adopt(self, written: list[tuple[Parameter, Tensor]]) -> None:
        """Take over the whole values that parameters were given during the run: this rank's runs."""
        for holdings in self._all:
            holdings.adopt([(parameter, values) for parameter, values in written if holdings.has(parameter)])
        for parameter, values in written:
            if self.having(parameter) is None:
                fill(parameter, values)

    def adopt_runs(self, runs: list[tuple[Parameter, Tensor]]) -> None:
        """Take over new values of the runs that this rank updates; see `ZeroCheckpointState.adopt_runs`."""
        for holdings in self._all:
            holdings.adopt_runs([(parameter, run) for parameter, run in runs if holdings.has(parameter)])

    def run_of(self, parameter: Parameter) -> tuple[int, int]:
        """Return start and number of the elements of flattened `parameter` that this rank updates, or holds."""
        return (self.having(parameter) or self._all[0]).run_of(parameter)

    def saves_master_of(self, parameter: Parameter) -> bool:
        """Return whether what is saved of `parameter` is an fp32 master copy."""
        return (self.having(parameter) or self._all[0]).saves_master_of(parameter)

    def in_memory(self) -> AbstractContextManager[None]:
        """Return a context for reading tensor by tensor: nothing of several optimizers is on NVMe."""
        return self._all[0].in_memory()


class JointGradients:
    """The gradients of one fit that trains by several optimizers.

    A backward pass may reach the parameters of all of them, or of some. Each has windows of its own: the backward
    passes that reached its parameters since its last step, or since its gradients were forgotten.

    Args:
        gradients: those of each engine.
        optimizers: the user's, in the same order.
    """

    def __init__(self, gradients: Sequence[PartitionedGradients], optimizers: Sequence[Any]) -> None:
        self._all = list(gradients)
        self._optimizers = list(optimizers)

    @property
    def each(self) -> list[PartitionedGradients]:
        """Those of each optimizer."""
        return list(self._all)

    def of(self, optimizer: Any) -> PartitionedGradients:
        """Return those of `optimizer`, one of the user's."""
        return self._all[_number_of(optimizer, self._optimizers)]

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Let `run` send `loss` backward, and each rank keep its part of the gradients. *Collective* over the world.

        Args:
            loss: as the user gave it.
            run: calls `backward` of the tensor it is given.
        """
        optimizer: Any = self._all[0].engine.optimizer  # all scale alike: see `ZeROPrecision.start_fit`
        scaled = optimizer.loss_scaler.scale_loss(loss) if optimizer.needs_scaler() else loss
        for gradients in self._all:
            gradients.before_shared_backward()
        run(scaled)
        for gradients in self._all:
            gradients.after_shared_backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all windows whose steps have not come."""
        for gradients in self._all:
            gradients.zero_grad(set_to_none)

    def end(self) -> None:
        """Stop noting which parameters get gradients."""
        for gradients in self._all:
            gradients.end()

    # Reading

    def norm(self) -> Tensor:
        """Return the 2-norm of the gradients of all optimizers that have some, before clipping. *Collective*.

        Raises:
            GradientsNotReadyError: no optimizer has gradients.
        """
        there = [gradients.norm() for gradients in self._all if gradients.are_there]
        if not there:
            raise GradientsNotReadyError(
                "There are no gradients of any optimizer now: they exist from a backward pass to the step. Read them "
                "between self.manual_backward(...) and optimizer.step()."
            )
        return torch.stack(there).square().sum().sqrt()

    def full(self, parameter: Parameter) -> Tensor | None:
        """Return the averaged gradient of `parameter` in its own shape, fp32; `None` if it is frozen. *Collective*.

        Raises:
            ConfigurationError: no optimizer has it.
        """
        for gradients in self._all:
            if gradients.concerns(parameter):
                return gradients.full(parameter)
        if not parameter.requires_grad:
            return None
        raise ConfigurationError(
            "The gradient of a parameter was asked for that no optimizer trains. ZeRO keeps gradients of trained "
            "parameters only: give the parameter to an optimizer in configure_optimizers."
        )


def join_checkpoint_states(
    holdings: Sequence[ZeroCheckpointState], optimizers: Sequence[Any]
) -> ZeroCheckpointState | JointCheckpointState:
    """Return what the engines of the user's `optimizers` hold as one."""
    return holdings[0] if len(holdings) == 1 else JointCheckpointState(holdings, optimizers)


def join_gradients(
    gradients: Sequence[PartitionedGradients], optimizers: Sequence[Any]
) -> PartitionedGradients | JointGradients:
    """Return the gradients of the engines of the user's `optimizers` as one."""
    return gradients[0] if len(gradients) == 1 else JointGradients(gradients, optimizers)
