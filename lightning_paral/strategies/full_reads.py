"""Readers for hooks of the user's: the same names under every strategy, whatever a rank holds."""

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.checkpoint.state.ended_optimizers import gather_full_tensor
from lightning_paral.engines.fsdp.gradients import gradient_norm
from lightning_paral.engines.fsdp.whole import whole


class FullTensorReaders(Strategy):
    """Mixin: gradients, parameters and optimizer state in their own shapes.

    It reads tensors that a rank holds whole or as a DTensor. All ranks that read get the same values.
    """

    def gradient_norm(self) -> Tensor:
        """Return the global 2-norm of all gradients. *Collective* over the world where they are divided."""
        assert self.lightning_module is not None
        return gradient_norm(self.lightning_module.parameters())

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a copy of the gradient of `parameter`, averaged over the ranks, `None` if there is none.

        *Collective* where it is divided.
        """
        return None if parameter.grad is None else whole(parameter.grad)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a copy of `parameter` in its own shape. *Collective* where it is divided."""
        return whole(parameter)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a copy of the optimizer's state `key` (`"exp_avg"`) of `parameter`, in its shape.

        *Collective* where it is divided.

        Raises:
            ValueError: there is no such state yet; states come with the first step.
        """
        for optimizer in self.optimizers:
            value = optimizer.state.get(parameter, {}).get(key)
            if isinstance(value, FlatShard):  # after the run
                return gather_full_tensor(value, self.root_device)
            if value is not None:
                return whole(torch.as_tensor(value))
        raise ValueError(f"The optimizer has no state {key!r} for this parameter, or not before its first step.")
