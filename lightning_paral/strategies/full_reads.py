"""Readers for hooks: full gradients, parameters and optimizer states, under every strategy by the same methods."""

from typing import Any, ClassVar

from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.state.ended_optimizers import EndedOptimizers
from lightning_paral.checkpoint.tensor_state import TensorState


class FullTensorReaders(ParallelStrategy):
    """Mixin: read gradients, parameters and optimizer states in full. All ranks that read get the same values.

    The strategies of engines that shard override `_sharded_state`.
    """

    _ended: ClassVar[EndedOptimizers] = EndedOptimizers()
    """The optimizers of past runs, of all strategies: a module may be trained by one after the other."""

    @property
    def _sharded_state(self) -> ShardedState:
        """The state of the module as it is now: of the run, or between runs."""
        assert self.lightning_module is not None
        return TensorState(self.lightning_module, self.optimizers, self.root_device, self._ended)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the global 2-norm of the gradients, before they are clipped; 0-dimensional, fp32 or wider.

        *Collective* over the world where gradients are sharded.

        Args:
            optimizer: whose parameters' gradients count; `None` for those of all parameters.

        Raises:
            GradientsNotReadyError: under ZeRO, not between the last backward pass of a step and the step itself.
        """
        return self._sharded_state.gradient_norm(optimizer)

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the gradient of `parameter`, averaged over the ranks; `None` if it has none.

        It is on the parameter's device and of its dtype, under ZeRO fp32. *Collective* over the world where gradients
        are sharded.

        Raises:
            GradientsNotReadyError: under ZeRO, not between the last backward pass of a step and the step itself.
        """
        return self._sharded_state.full_gradient(parameter)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter`, of its own dtype, fp32 where the optimizer has an fp32 master copy.

        *Collective* over the world where parameters or master copies are sharded.
        """
        return self._sharded_state.full_parameter(parameter)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer's state `key` of `parameter`, such as `"exp_avg"`.

        *Collective* over the world where it is sharded.

        Raises:
            ValueError: there is no such state yet; optimizers create it in their first step.
        """
        return self._sharded_state.full_optimizer_state(parameter, key)
