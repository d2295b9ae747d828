"""Explain errors that torch and DeepSpeed raise because parameters are partitioned."""

import re
from traceback import walk_tb

_SECOND_GRADIENT = (
    "Weights got gradients from a second backward pass, of which DeepSpeed supports one per step: from loss.backward() "
    "in a step, or from torch.utils.checkpoint with use_reentrant=True. For gradients by inputs, call "
    "torch.autograd.grad(loss, inputs); in manual optimization, self.manual_backward(loss)."
)
_AT_EVERY_STAGE = {
    "Creating a Parameter from an instance of type": (
        "A parameter was created from one that ZeRO shards, as pruning, parametrizations and nn.Parameter(parameter) "
        "do. It would be neither sharded nor trained. Create it in __init__ or configure_model, or use paral_ddp."
    ),
    "Multiple gradient reductions? (is|are) currently not supported": _SECOND_GRADIENT,
}
_AT_STAGE_3 = {
    "don't yet support saved tensor hooks": (
        "A module ran inside a transform of torch.func, such as grad or jacrev. Use torch.autograd.grad, or train with "
        "paral_zero2."
    ),
    "has no attribute 'ds_(status|id)'": (
        "A parameter was replaced by a tensor, as torch.func.functional_call does. Write the operation with "
        "torch.nn.functional, or train with paral_zero2."
    ),
    "tracing error at step": (
        "Modules ran in a different order than in earlier steps, or with different parameters. Under ZeRO stage 3 "
        "DeepSpeed relies on that order. Do not add or replace parameters during a fit, or train with paral_zero2."
    ),
    r"size of tensor \w \(0\)|mat2 must be a matrix|weight' must be 2-D|of size 0\b|size mismatch.* \(0\)": (
        "A weight was used while each rank had only its shard of it. Under ZeRO stage 3 weights are gathered for the "
        "forward pass and for one backward pass of their module. A second one, after backward(retain_graph=True) or "
        "through torch.autograd.grad(create_graph=True), finds only the shard. Train with paral_zero2, or paral_ddp."
    ),
}
"""Maps a pattern of torch's or DeepSpeed's message to what it means and what to do."""


def explanation(error: BaseException, *, stage: int) -> str | None:
    """Return what `error` means under ZeRO, and what to do; `None` if it has another cause."""
    if stage == 3 and _has_lost_gradient(error):
        return _SECOND_GRADIENT
    known = _AT_EVERY_STAGE | (_AT_STAGE_3 if stage == 3 else {})
    return next((meaning for pattern, meaning in known.items() if re.search(pattern, str(error))), None)


def _has_lost_gradient(error: BaseException) -> bool:
    """Return whether DeepSpeed has found no gradient, because another backward pass has taken it."""
    if not isinstance(error, AttributeError) or error.name != "numel" or error.__traceback__ is None:
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("deepspeed.runtime.zero")
