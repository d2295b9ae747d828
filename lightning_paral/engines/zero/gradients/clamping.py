"""Clamping of averaged gradients, wherever DeepSpeed keeps a rank's part of them."""

from typing import Any

from lightning_paral.compat.deepspeed.gradients import refresh_norms


def clamp_gradients(optimizer: Any, stage: int, limit: float, *, offloaded: bool) -> None:
    """Clamp each element of the averaged gradients to `[-limit, limit]`, in place. No collective.

    Args:
        optimizer: DeepSpeed's, with the gradients of a window that is complete.
        stage: ZeRO's.
        limit: for gradients as they are kept, which are scaled as the loss was.
        offloaded: whether the optimizer runs on the host.
    """
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    if stage == 3 and offloaded:
        for parameter in [parameter for group in optimizer.fp16_groups for parameter in group]:
            # It may be on NVMe: what is read is not what is kept.
            safe_set_local_grad(parameter, safe_get_local_grad(parameter).clamp_(-limit, limit))
    elif offloaded:
        for partition in optimizer.single_partition_of_fp32_groups:
            partition.grad.clamp_(-limit, limit)
        refresh_norms(optimizer)
    else:
        for group in optimizer.averaged_gradients.values():
            for gradient in group or ():
                gradient.clamp_(-limit, limit)
