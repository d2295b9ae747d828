"""The gradients of an accumulation window in DeepSpeed, and their norms."""

from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        ".averaged_gradients": "clamp gradients; discard those of a window that ends without a step",
        ".all_grad_tensors": "discard the gradients of a window that ends without a step",
        ".micro_step_id": "discard the gradients of a window that ends without a step",
        ".offload_gradient_dict": "recompute the norms of gradients that have been changed",
        ".norm_for_param_grads": "recompute the norms of gradients that have been changed",
        ".params_in_partition": "recompute the norms of gradients that have been changed",
        "reset_cpu_buffers": "discard the gradients of a window that ends without a step",
        "get_param_id(param)": "recompute the norms of gradients that have been changed",
        "scaled_global_norm": "read the norm of gradients before the step that clips them",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".norm_for_param_grads": "recompute the norms of gradients that have been changed",
        ".averaged_gradients": "clamp gradients",
        "._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition": "zero a gradient of an earlier window",
        "get_param_id(param)": "recompute the norms of gradients that have been changed",
        "_get_norm_groups": "read the norm of gradients before the step that clips them",
    },
}


def forget_window(optimizer: Any, *, offloaded: bool) -> None:
    """Discard the gradients that stage 1 or 2 has accumulated since the last step."""
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    optimizer.micro_step_id = -1
    if offloaded:
        optimizer.reset_cpu_buffers()


def zero_kept_gradient(optimizer: Any, parameter: Any, *, offloaded: bool) -> None:
    """Zero this rank's shard of the gradient of `parameter`, at stage 3."""
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id].zero_()
    if offloaded:
        optimizer.norm_for_param_grads.pop(optimizer.get_param_id(parameter), None)


def refresh_norms(optimizer: Any) -> None:
    """Recompute the norms of offloaded gradients that DeepSpeed keeps at stages 1 and 2."""
    for group, parameters in enumerate(optimizer.params_in_partition):
        for parameter, gradient in zip(parameters, optimizer.offload_gradient_dict[group], strict=True):
            index = optimizer.get_param_id(parameter)
            if index in optimizer.norm_for_param_grads:
                optimizer.norm_for_param_grads[index] = gradient.double().norm(2)


def scaled_norm(optimizer: Any, stage: int) -> Tensor:
    """Return the global 2-norm of the averaged gradients, in fp32 and multiplied by the loss scale. *Collective*."""
    if stage < 3:
        return torch.as_tensor(optimizer.scaled_global_norm()).float()
    squares = torch.stack([norm.float() ** 2 for norm in optimizer._get_norm_groups()])
    return squares.sum().sqrt()


def clamp_gradients(optimizer: Any, stage: int, limit: float, *, offloaded: bool) -> None:
    """Clamp each element of the averaged gradients to `[-limit, limit]`, in place, without communication.

    Args:
        optimizer: DeepSpeed's optimizer, which has the gradients of a complete accumulation window.
        stage: the stage of ZeRO.
        limit: the limit, already multiplied by the loss scale, because the gradients are.
        offloaded: whether the optimizer runs on the host.
    """
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    if stage == 3 and offloaded:
        for parameter in [parameter for group in optimizer.fp16_groups for parameter in group]:
            # The gradient may be on NVMe: the tensor that was read is a copy, and must be written back.
            safe_set_local_grad(parameter, safe_get_local_grad(parameter).clamp_(-limit, limit))
    elif offloaded:
        for partition in optimizer.single_partition_of_fp32_groups:
            partition.grad.clamp_(-limit, limit)
        refresh_norms(optimizer)
    else:
        for group in optimizer.averaged_gradients.values():
            for gradient in group or ():
                gradient.clamp_(-limit, limit)
