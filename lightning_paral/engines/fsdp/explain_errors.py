"""Explain torch's errors about DTensors: what the user's code did, and what to do instead."""

from lightning_paral.model.units import Units

MIXED = "mixed torch.Tensor and DTensor"
_NO_RULE = ("sharding strategy", "placement changes", "unevenly sharded", "as_strided not supported with DTensor",
            "along the sharded dimension", "Sharding propagation failed")  # fmt: skip
_IN_PLACE = ("RegisterPostBackwardFunction", "is a view and is being modified inplace")
_DEEPCOPY = ("FSDP does not support deepcopy", "copy_() on an invalid python storage")
_FORWARD_MODE = ("returning a view (or an input as-is) but the jvp", "must implement the jvp function")
_TRANSFORM = "Cannot access storage of TensorWrapper"
_TWICE = "storage of size 0"
_NOT_IN_GRAPH = "appears to not have been used in the graph"


def explanation(error: BaseException, *, units: Units, in_step: bool) -> str | None:
    """Return the cause of `error` and what to do about it; `None` if the error is not about sharding.

    Args:
        error: an error that torch raised.
        units: the units of the sharded module.
        in_step: whether it was raised inside a step, not in a hook.
    """
    message = str(error)
    names = [unit.name for unit in units.inner]
    listed = f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}" if names else "none but the root"
    if MIXED in message and in_step:
        return (
            "A weight was used outside of its unit, where it is sharded (a DTensor), together with plain tensors. "
            f"Units: {listed}. Use it in a method of its unit, or choose units=[...] that leave it to the root, which "
            "stays unsharded throughout a step. Create modules in __init__ or configure_model: modules that are "
            "created later, or copied from sharded ones, are not unsharded."
        )
    if MIXED in message:
        return (
            "Sharded tensors (DTensors) and plain tensors were mixed in one operation. In hooks, parameters, gradients "
            "and optimizer state are sharded. parameter.copy_(full), parameter.data = full, load_state_dict and "
            "writing by index take full tensors. For other operations, gather the sharded tensor with "
            "tensor.full_tensor() on all ranks, or do it in a step."
        )
    if all(part in message for part in _IN_PLACE):
        return (
            f"A unit changes one of its inputs in place (units: {listed}). FSDP passes inputs that need gradients "
            "through a function of its own, whose results cannot be changed in place. Write x = x + y instead of "
            "x += y, or choose units=[...] that do not change their inputs."
        )
    if _TWICE in message:
        return (
            "A weight was used after it had been resharded. FSDP unshards the weights of a unit for its forward pass "
            "and for one backward pass, but a gradient penalty with torch.autograd.grad(create_graph=True) needs a "
            "second backward pass. Train with paral_ddp or paral_zero2."
        )
    if _NOT_IN_GRAPH in message:
        return (
            "A gradient was computed, as by torch.autograd.grad, by a tensor that is not in the graph. The weight of a "
            f"unit is not, because it is sharded, and the step computes with the unsharded weight (units: {listed}). "
            "Compute gradients by inputs or by weights outside of units, read others after the backward pass, with "
            "trainer.strategy.full_gradient(parameter), or train with paral_ddp."
        )
    if any(pattern in message for pattern in _FORWARD_MODE):
        return (
            f"A unit got a dual tensor of forward-mode automatic differentiation (units: {listed}). FSDP passes inputs "
            "through a function of its own, which has no forward-mode derivative. Train with paral_ddp."
        )
    if _TRANSFORM in message:
        return (
            f"A unit ran inside a transform of torch.func (units: {listed}), where FSDP of older versions of torch "
            "cannot unshard weights. Update torch to 2.13, use torch.autograd.grad, or train with paral_ddp."
        )
    if any(pattern in message for pattern in _DEEPCOPY):
        return (
            f"A module that is sharded was copied with copy.deepcopy (units: {listed}). Copy it before it is sharded, "
            "in __init__ or configure_model, and update the copy with load_state_dict."
        )
    if any(part in message for part in _NO_RULE):
        return (
            "torch cannot do this operation on a sharded tensor (a DTensor). In hooks, parameters, gradients and "
            "optimizer state are sharded. Do it on tensor.full_tensor(), on all ranks, and write the result back with "
            "parameter.copy_(result), or do it in a step, where the root's parameters are unsharded."
        )
    return None
