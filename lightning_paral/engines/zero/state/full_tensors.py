"""Whole tensors of which every rank holds a part, for hooks of the user's. *Collective*, all of them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.state.ended_optimizers import gather_full_tensor
from lightning_paral.engines.zero.gradients.partitioned import PartitionedGradients
from lightning_paral.engines.zero.parameters.writes import Writes
from lightning_paral.engines.zero.state.joint import JointGradients
from lightning_paral.errors import ConfigurationError


class ZeroFullTensorReaders:
    """What the strategy lets hooks read, whatever a rank holds of it."""

    _gradients: PartitionedGradients | JointGradients | None = None
    """Those of the fit, while there is one."""
    _writes: Writes | None = None
    """What code of the user's writes to parameters, while there is a run."""
    optimizers: list[Optimizer]

    if TYPE_CHECKING:

        @property
        def root_device(self) -> torch.device:
            """This rank's device."""

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the global 2-norm of the gradients before they are clipped by norm. *Collective* over the world.

        Args:
            optimizer: whose parameters' gradients count; by default those of all optimizers that have some.

        Raises:
            GradientsNotReadyError: not between the last backward pass of a step and the step itself.
        """
        gradients = self._fit_gradients()
        return gradients.norm() if optimizer is None else gradients.of(optimizer).norm()

    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return the gradient of `parameter`, averaged over the ranks, fp32, `None` if frozen. *Collective*.

        Raises:
            GradientsNotReadyError: not between the last backward pass of a step and the step itself.
        """
        return self._fit_gradients().full(parameter)

    def full_parameter(self, parameter: Parameter) -> Tensor:
        """Return a copy of `parameter` in its own shape, in fp32 where a master copy exists. *Collective*."""
        import deepspeed

        if self._writes is not None:
            self._writes.settle()
        if self._gradients is not None and any(each.concerns(parameter) for each in self._gradients.each):
            full: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
            if full is not None:
                return full.detach().clone()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Return the optimizer's state `key` (`"exp_avg"`) of `parameter`, in its shape. *Collective*.

        Raises:
            ValueError: there is no such state yet; states come with the first step.
        """
        import deepspeed

        if self._gradients is None:  # after the fit
            kept = [o.state[parameter][key] for o in self.optimizers if key in o.state.get(parameter, {})]
            if kept:
                return gather_full_tensor(kept[0], self.root_device)
        self._fit_gradients()
        try:
            state: Tensor | None = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        except (KeyError, TypeError, AttributeError):
            state = None
        if state is None:
            raise ValueError(f"The optimizer has no state {key!r} for this parameter, or not before its first step.")
        return state

    def _fit_gradients(self) -> PartitionedGradients | JointGradients:
        if self._gradients is None:
            raise ConfigurationError("Gradients and optimizer states exist during trainer.fit only.")
        return self._gradients
