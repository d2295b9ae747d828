"""Lightning's counters of batches and optimizer steps in a checkpoint."""

from copy import deepcopy
from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.loops._TrainingEpochLoop": {
        "._batches_that_stepped": "save the last completed step after an exception in a later one",
    },
}


def is_at_end_of_epoch(loops: dict[str, Any]) -> bool:
    """Return whether all batches of an epoch are completed, the epoch is not, and it has run no validation.

    From such a checkpoint, Lightning would train one batch too many.
    """
    fit = loops["fit_loop"]
    batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    return bool(
        batches["is_last_batch"]
        and batches["current"]["completed"] == batches["current"]["ready"]
        and epochs["processed"] < epochs["started"]
        and not fit["epoch_loop.val_loop.batch_progress"]["total"]["ready"]
    )


def rewind_to_last_step(loops: dict[str, Any], num_batches: int, *, is_last_batch: bool = False) -> dict[str, Any]:
    """Return the entry `loops` of a checkpoint as it was at the end of the batch with the last optimizer step.

    A checkpoint that is saved after an exception in the middle of a step has the weights of the last completed step,
    but counts the batch in which the exception was raised, and batches whose gradients were being accumulated. A
    resumed run would skip them, or end the epoch before its last batch.

    Args:
        loops: the entry of a checkpoint that was saved inside a fit. It is not changed.
        num_batches: the number of processed batches since the last optimizer step.
        is_last_batch: whether the batch with the last optimizer step is the last one of the epoch.
    """
    loops = deepcopy(loops)
    fit = loops["fit_loop"]
    batches = fit["epoch_loop.batch_progress"]
    for counters in (batches["total"], batches["current"]):
        processed = counters["processed"] - num_batches
        # As in a checkpoint saved in `on_train_batch_end`, when the batch is processed and not yet completed.
        counters |= {"ready": processed, "started": processed, "processed": processed, "completed": processed - 1}
    batches["is_last_batch"] = is_last_batch
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # Lightning adds it when it resumes from such a batch
    optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    manual = fit["epoch_loop.manual_optimization.optim_step_progress"]
    for progress in (optimizer["step"], optimizer["zero_grad"], manual):
        for counters in (progress["total"], progress["current"]):
            counters |= dict.fromkeys(counters, counters["completed"])
    return loops
