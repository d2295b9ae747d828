"""The gradients of an accumulation window in DeepSpeed, and what DeepSpeed records about them."""

from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.private_name import PrivateName

_STAGE2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_FORGET = "to discard the gradients of a window that ends without a step"
_NO_FORGETTING = "zero_grad of DeepSpeed's optimizers keeps it until the next step"
_NORMS = "to recompute norms of gradients that have been changed"
_ONCE = "with offload DeepSpeed computes norms once, as gradients arrive"


def _attribute(owner: str, name: str, purpose: str, reason: str) -> PrivateName:
    return PrivateName(
        name=f"{owner}.{name}", purpose=purpose, reason=reason, seen="deepspeed 0.19.8", on_instances=True
    )


NAMES = (
    _attribute(_STAGE2, "averaged_gradients", "to clamp gradients, and " + _FORGET, _NO_FORGETTING),
    _attribute(_STAGE2, "all_grad_tensors", _FORGET, _NO_FORGETTING),
    _attribute(_STAGE2, "micro_step_id", _FORGET, _NO_FORGETTING),
    _attribute(_STAGE2, "offload_gradient_dict", _NORMS, _ONCE),
    _attribute(_STAGE2, "norm_for_param_grads", _NORMS, _ONCE),
    _attribute(_STAGE2, "params_in_partition", _NORMS, _ONCE),
    _attribute(_STAGE3, "norm_for_param_grads", _NORMS, _ONCE),
    _attribute(
        _STAGE3,
        "averaged_gradients",
        "to clamp gradients",
        "safe_set_local_grad writes one parameter at a time, with padding; the step uses these tensors",
    ),
    _attribute(
        _STAGE3,
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
        "to zero gradients of an earlier window if the parameter got no new one",
        "with offload safe_set_local_grad writes to a tensor that is later overwritten from this one",
    ),
    PrivateName(
        name=f"{_STAGE2}.reset_cpu_buffers",
        purpose=_FORGET,
        reason=_NO_FORGETTING,
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_STAGE2}.get_param_id",
        purpose=_NORMS,
        reason=_ONCE,
        seen="deepspeed 0.19.8",
        parameters=("self", "param"),
    ),
    PrivateName(
        name=f"{_STAGE3}.get_param_id",
        purpose=_NORMS,
        reason=_ONCE,
        seen="deepspeed 0.19.8",
        parameters=("self", "param"),
    ),
    *(
        PrivateName(
            name=name,
            purpose="to read the norm of gradients before the step that clips by it",
            reason="engine.get_global_grad_norm is set only after the step, and safe_get_local_grad reads one "
            "parameter at a time, which on NVMe reads a whole sub-group for each",
            seen="deepspeed 0.19.8",
        )
        for name in (f"{_STAGE2}.scaled_global_norm", f"{_STAGE3}._get_norm_groups")
    ),
)


def forget_window(optimizer: Any, *, offloaded: bool) -> None:
    """Discard the gradients that stage 1 or 2 has accumulated since the last step."""
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    optimizer.micro_step_id = -1
    if offloaded:
        optimizer.reset_cpu_buffers()


def zero_kept_gradient(optimizer: Any, parameter: Any, *, offloaded: bool) -> None:
    """Zero what stage 3 keeps of the gradient of `parameter`."""
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id].zero_()
    if offloaded:
        optimizer.norm_for_param_grads.pop(optimizer.get_param_id(parameter), None)


def refresh_norms(optimizer: Any) -> None:
    """Recompute the norms that DeepSpeed keeps of offloaded gradients at stages 1 and 2."""
    for group, parameters in enumerate(optimizer.params_in_partition):
        for parameter, gradient in zip(parameters, optimizer.offload_gradient_dict[group], strict=True):
            index = optimizer.get_param_id(parameter)
            if index in optimizer.norm_for_param_grads:
                optimizer.norm_for_param_grads[index] = gradient.double().norm(2)


def scaled_norm(optimizer: Any, stage: int) -> Tensor:
    """Return the global 2-norm of the averaged gradients, of dtype fp32, with the loss scale in it. *Collective*."""
    if stage < 3:
        return torch.as_tensor(optimizer.scaled_global_norm()).float()
    squares = torch.stack([norm.float() ** 2 for norm in optimizer._get_norm_groups()])
    return squares.sum().sqrt()


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
