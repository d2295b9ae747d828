"""Reduce the gradients that DeepSpeed omits at stage 1 when reduction overlaps the backward pass.

With `overlap_comm`, `reduce_gradients` of DeepSpeed 0.19.8 assumes that hooks have reduced every gradient during the
last backward pass of a window. But hooks do not reduce gradients that only an earlier pass produced, and they reduce
none at all if DeepSpeed was not told that the pass is the last. The optimizer would then use local gradients, without
an error.
"""

from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "reduce_gradients(pipeline_parallel)": "reduce at stage 1 what hooks have not reduced",
        "reduce_ready_partitions_and_remove_grads(param, i)": "reduce at stage 1 what hooks have not reduced",
        "get_gradient_for_reduction(param)": "reduce at stage 1 what hooks have not reduced",
        "setup_buckets": "reduce at stage 1 what hooks have not reduced",
        ".ipg_buckets": "reduce at stage 1 what hooks have not reduced",
        ".params_already_reduced": "reduce at stage 1 what hooks have not reduced",
        ".overlap_comm": "reduce at stage 1 what hooks have not reduced",
    },
}


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
