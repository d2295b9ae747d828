"""A gradient scaler whose subclasses define how gradients are unscaled."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "torch.amp.GradScaler": {
        "_unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)": "make all ranks skip the step together",
    },
}


class UnscalingGradScaler(torch.amp.GradScaler):
    """Unscales gradients with a method that subclasses define.

    Raises:
        PrivateNameError: `GradScaler` in this version of torch unscales in a different way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named(NAMES, "_unscale_grads_").resolve()
        super().__init__(*args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf)

    @abstractmethod
    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients of `optimizer` by `inv_scale`, in place, and check whether they are finite.

        Args:
            optimizer: the optimizer whose gradients are unscaled.
            inv_scale: the factor, a 0-dimensional tensor.
            found_inf: a tensor of shape `[1]` or `[]` with the value 0.0, which means that all gradients are finite.

        Returns:
            For each device, a tensor like `found_inf` that is not 0.0 if some gradient is not finite.
        """
