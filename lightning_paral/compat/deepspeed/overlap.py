"""Reduce the gradients that DeepSpeed omits at stage 1 when reduction overlaps the backward pass.

With `overlap_comm`, `reduce_gradients` of DeepSpeed 0.19.8 assumes that hooks have reduced every gradient during the
last backward pass of a window. But hooks do not reduce gradients that only an earlier pass produced, and they reduce
none at all if DeepSpeed was not told that the pass is the last. The optimizer would then use local gradients, without
an error.
"""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

_STAGE2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_PURPOSE = "to reduce at stage 1 the gradients that hooks have not reduced"
_REASON = "no option makes the engine reduce them, so we use the methods and attributes with which it reduces"


def _attribute(name: str) -> PrivateName:
    return PrivateName(
        name=f"{_STAGE2}.{name}", purpose=_PURPOSE, reason=_REASON, seen="deepspeed 0.19.8", on_instances=True
    )


def _method(name: str, *parameters: str) -> PrivateName:
    return PrivateName(
        name=f"{_STAGE2}.{name}", purpose=_PURPOSE, reason=_REASON, seen="deepspeed 0.19.8", parameters=parameters
    )


NAMES = (
    _method("reduce_gradients", "self", "pipeline_parallel"),
    _method("reduce_ready_partitions_and_remove_grads", "self", "param", "i"),
    _method("get_gradient_for_reduction", "self", "param"),
    _method("setup_buckets", "self"),
    _attribute("ipg_buckets"),
    _attribute("params_already_reduced"),
    _attribute("overlap_comm"),
)


def overlaps(optimizer: Any) -> bool:
    """Return whether `optimizer`, of stage 1 or 2, reduces gradients during the backward pass."""
    return bool(optimizer.overlap_comm)


def reduce_skipped_by_hooks(optimizer: Any) -> None:
    """Make `optimizer` reduce the gradients that hooks have not reduced, at the end of each window.

    Args:
        optimizer: a `deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer` of stage 1 with `overlap_comm`.
    """
    plain = optimizer.reduce_gradients

    def reduce_gradients(pipeline_parallel: bool = False) -> None:
        _reduce_rest(optimizer)
        plain(pipeline_parallel)

    optimizer.reduce_gradients = reduce_gradients


def _reduce_rest(optimizer: Any) -> None:
    optimizer.setup_buckets()
    waiting = {parameter for bucket in optimizer.ipg_buckets.values() for _, _, parameter in bucket.params}
    for group, parameters in enumerate(optimizer.bit16_groups):
        for parameter in parameters:
            number = optimizer.get_param_id(parameter)
            is_taken = optimizer.params_already_reduced[number] or number in waiting
            if not is_taken and optimizer.get_gradient_for_reduction(parameter) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, group)
