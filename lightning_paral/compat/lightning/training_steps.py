"""The step with which Lightning's training loop logs values."""

from lightning.pytorch import Trainer

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.loops._TrainingEpochLoop": {
        "._batches_that_stepped": "log values with the same step as Lightning does",
    },
}


def step_of_loggers(trainer: Trainer) -> int:
    """Return the step with which Lightning logs values in a training batch."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step
