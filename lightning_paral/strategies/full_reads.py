"""Readers for hooks: full gradients, parameters and optimizer states, by the same methods under every strategy."""

from typing import Any, ClassVar

from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.state.ended_optimizers import EndedOptimizers
from lightning_paral.checkpoint.state.weights import sharded_state_dict
from lightning_paral.checkpoint.tensor_state import TensorState


class FullTensorReaders(ParallelStrategy):
    """Mixin: read gradients, parameters and optimizer states in full; every rank gets the same values.

    Strategies that shard override `_sharded_state`.
    """

    _ended: ClassVar[EndedOptimizers] = EndedOptimizers()
    """The optimizers of past runs under any strategy, because a module may be trained by several strategies in turn."""

    @property
    def _sharded_state(self) -> ShardedState:
        """The current state of the module, during a run or between runs."""
        assert self.lightning_module is not None
        return TensorState(self.lightning_module, self.optimizers, self.root_device, self._ended)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the global 2-norm of the gradients before clipping, as a 0-dimensional tensor of fp32 or wider.

        *Collective* over the world if gradients are sharded.

        Args:
            optimizer: count only the gradients of the parameters of this optimizer; `None` counts all parameters.

        Raises:
            GradientsNotReadyError: under ZeRO, unless called between the last backward pass and the optimizer step.
        """
        return self._sharded_state.gradient_norm(optimizer)

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a full copy of the gradient of `parameter`, averaged over the ranks; `None` if it has none.

        The copy has the device and dtype of the parameter; under ZeRO it is fp32. *Collective* over the world if
        gradients are sharded.

        Raises:
            GradientsNotReadyError: under ZeRO, unless called between the last backward pass and the optimizer step.
        """
        return self._sharded_state.full_gradient(parameter)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a full copy of `parameter`, in its own dtype, or in fp32 if the optimizer has fp32 master weights.

        *Collective* over the world if parameters or master weights are sharded.
        """
        return self._sharded_state.full_parameter(parameter)

    def full_state_dict(self, module: Module | None = None) -> dict[str, Any]:
        """Return `module.state_dict()` with full copies of parameters in host memory, on every rank.

        Parameters are gathered one after the other, and are those that `full_parameter` returns. *Collective* over the
        world: call it on all ranks, and write a file on one of them.

        Args:
            module: the LightningModule, which is the default, or a part of it.
        """
        self.lightning_module_state_dict()  # collects what user code has written, and buffers of other stages
        assert self.lightning_module is not None
        return sharded_state_dict(module or self.lightning_module, lambda p: self.full_parameter(p).cpu(), True)

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return a full copy of the optimizer's state `key` of `parameter`, such as `"exp_avg"`.

        *Collective* over the world if the state is sharded.

        Raises:
            ValueError: the state does not exist; optimizers create their states in the first step.
        """
        return self._sharded_state.full_optimizer_state(parameter, key)
