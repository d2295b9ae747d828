"""Explanations of torch's errors about DTensors: what the user's code did, and what to do instead."""

from lightning_paral.model.units import Units

MIXED = "mixed torch.Tensor and DTensor"
_NO_RULE = ("sharding strategy", "placement changes", "unevenly sharded", "as_strided not supported with DTensor",
            "along the sharded dimension", "Sharding propagation failed")  # fmt: skip
_IN_PLACE = ("RegisterPostBackwardFunction", "is a view and is being modified inplace")
_DEEPCOPY = ("FSDP does not support deepcopy", "copy_() on an invalid python storage")
_TWICE = "storage of size 0"


def explanation(error: BaseException, *, units: Units, in_step: bool) -> str | None:
    """Return what `error` means, and what to do, for a module sharded by `units`; `None` if it is of another kind.

    Args:
        error: of torch.
        units: of the module.
        in_step: whether it was raised inside a step, not in a hook.
    """
    said = str(error)
    names = [unit.name for unit in units.inner]
    listed = f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}" if names else "none but the root"
    if MIXED in said and in_step:
        return (
            "A weight was used outside of its unit, where it is sharded (a DTensor), together with plain tensors. "
            f"Units: {listed}. Use it in a method of its unit, or choose units=[...] that leave it to the root, which "
            "is unsharded for all of a step. Create modules in __init__ or configure_model: modules that are created "
            "later, or copied from sharded ones, are not unsharded."
        )
    if MIXED in said:
        return (
            "Sharded tensors (DTensors) and plain tensors were mixed in one operation. In hooks, parameters, gradients "
            "and optimizer state are sharded. parameter.copy_(full), parameter.data = full, load_state_dict and "
            "writing by index take full tensors. For other operations, gather the sharded tensor with "
            "tensor.full_tensor() on all ranks, or do it in a step."
        )
    if all(part in said for part in _IN_PLACE):
        return (
            f"A unit changes one of its inputs in place (units: {listed}). FSDP passes inputs that need gradients "
            "through a function of its own, whose results cannot be changed in place. Write x = x + y in place of "
            "x += y, or choose units=[...] that are not called with what they change."
        )
    if _TWICE in said:
        return (
            "A weight was used after it had been resharded. FSDP unshards the weights of a unit for its forward pass "
            "and for one backward pass. A second backward pass, which torch.autograd.grad(create_graph=True) in a "
            "gradient penalty makes necessary, comes too late. Train with paral_ddp or paral_zero2."
        )
    if any(pattern in said for pattern in _DEEPCOPY):
        return (
            f"A module that is sharded was copied with copy.deepcopy (units: {listed}). Copy it before it is sharded, "
            "in __init__ or configure_model, and bring it up to date with load_state_dict."
        )
    if any(part in said for part in _NO_RULE):
        return (
            "torch cannot do this operation on a sharded tensor (a DTensor). In hooks, parameters, gradients and "
            "optimizer state are sharded. Do it on tensor.full_tensor(), on all ranks, and write the result back with "
            "parameter.copy_(result), or do it in a step, where the root's parameters are unsharded."
        )
    return None
