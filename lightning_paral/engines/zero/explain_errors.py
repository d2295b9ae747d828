"""Explain errors that torch and DeepSpeed raise because parameters are partitioned."""

import re
from traceback import walk_tb

_EMPTY = re.compile(
    r"size of tensor \w \(0\)|mat2 must be a matrix|weight' must be 2-D|of size 0\b|size mismatch.* \(0\)"
)
_CHANGED = ("tracing error at step",)
_REPLACED = ("has no attribute 'ds_status'", "has no attribute 'ds_id'")
_SAVED_TENSORS = "don't yet support saved tensor hooks"
_SECOND_GRADIENT = re.compile("Multiple gradient reductions? (is|are) currently not supported")
_PARAMETER_FROM_PARAMETER = "Creating a Parameter from an instance of type"


def explanation(error: BaseException, *, stage: int) -> str | None:
    """Return what `error` means under ZeRO, and what to do; `None` if it has another cause."""
    message = str(error)
    if _PARAMETER_FROM_PARAMETER in message:
        return (
            "A parameter was created from one that ZeRO shards, as pruning, parametrizations and "
            "nn.Parameter(parameter) do. It would be neither sharded nor trained. Create it in __init__ or "
            "configure_model, or train with paral_ddp."
        )
    if _SECOND_GRADIENT.search(message) or (stage == 3 and _has_lost_gradient(error)):
        return (
            "Weights got gradients from a second backward pass, of which DeepSpeed supports one per step: from "
            "loss.backward() in a step, or from torch.utils.checkpoint with use_reentrant=True. For gradients by "
            "inputs, call torch.autograd.grad(loss, inputs); in manual optimization, self.manual_backward(loss)."
        )
    if stage < 3:
        return None
    if _SAVED_TENSORS in message:
        return (
            "A module ran inside a transform of torch.func, such as grad or jacrev. Under ZeRO stage 3 weights are "
            "gathered by hooks, which these transforms do not support. Use torch.autograd.grad, or train with "
            "paral_zero2."
        )
    if any(pattern in message for pattern in _REPLACED):
        return (
            "A parameter was replaced by a tensor, as torch.func.functional_call does. Under ZeRO stage 3 a module "
            "gathers its own parameters before it runs, and cannot run with others. Write the operation with "
            "torch.nn.functional, or train with paral_zero2."
        )
    if any(pattern in message for pattern in _CHANGED):
        return (
            "Modules ran in a different order than in earlier steps, or with different parameters. Under ZeRO stage 3 "
            "DeepSpeed relies on that order. Do not add or replace parameters during a fit, or train with paral_zero2."
        )
    if _EMPTY.search(message):
        return (
            "A weight was used while each rank had only its shard of it. Under ZeRO stage 3 weights are gathered for "
            "the forward pass and for one backward pass of their module. A second backward pass, after "
            "backward(retain_graph=True) or through torch.autograd.grad(create_graph=True) as in gradient penalties, "
            "finds only the shard. Train with paral_zero2, or paral_ddp."
        )
    return None


def _has_lost_gradient(error: BaseException) -> bool:
    """Return whether DeepSpeed has found no gradient, because another backward pass has taken it."""
    if not isinstance(error, AttributeError) or error.name != "numel" or error.__traceback__ is None:
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("deepspeed.runtime.zero")
