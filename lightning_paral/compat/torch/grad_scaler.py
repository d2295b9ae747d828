"""A gradient scaler that unscales gradients another way."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.compat.private_name import PrivateName

_UNSCALE = PrivateName(
    name="torch.amp.GradScaler._unscale_grads_",
    purpose="to have all ranks skip the step where the shard of one is not finite",
    reason="unscale_ looks at this rank's gradients alone, and step() calls this method as well",
    seen="torch 2.11 to 2.13",
    parameters=("self", "optimizer", "inv_scale", "found_inf", "allow_fp16"),
)
NAMES = (_UNSCALE,)


class UnscalingGradScaler(torch.amp.GradScaler):
    """Unscales gradients by a method of subclasses.

    Raises:
        PrivateNameError: `GradScaler` of this version of torch unscales another way.
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
        """Multiply the gradients of `optimizer` by `inv_scale`, and return by device whether any is not finite.

        Args:
            optimizer: whose gradients.
            inv_scale: a factor, 0-dimensional.
            found_inf: what is returned for a device where all are finite: 0.0, of shape `[1]` or `[]`.
        """
