"""A gradient scaler whose subclasses define how gradients are unscaled."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.compat.private_name import PrivateName

_UNSCALE = PrivateName(
    name="torch.amp.GradScaler._unscale_grads_",
    purpose="to make all ranks skip the step if the shard of any is not finite",
    reason="unscale_ checks only this rank's gradients, and step() calls this method as well",
    seen="torch 2.11 to 2.13",
    parameters=("self", "optimizer", "inv_scale", "found_inf", "allow_fp16"),
)
NAMES = (_UNSCALE,)


class UnscalingGradScaler(torch.amp.GradScaler):
    """Unscales gradients by a method that subclasses define.

    Raises:
        PrivateNameError: `GradScaler` of this version of torch unscales in another way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _UNSCALE.resolve()
        super().__init__(*args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf)

    @abstractmethod
    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients of `optimizer` by `inv_scale`, and return for each device whether any is not finite.

        Args:
            optimizer: the optimizer whose gradients are unscaled.
            inv_scale: the factor, 0-dimensional.
            found_inf: returned for a device whose gradients are all finite: 0.0, of shape `[1]` or `[]`.
        """
