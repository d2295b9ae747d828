"""The step with which Lightning's training loop logs values."""

from lightning.pytorch import Trainer

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="lightning.pytorch.loops._TrainingEpochLoop._batches_that_stepped",
        on_instances=True,
        purpose="to log values with the same step as Lightning does",
        reason="trainer.global_step counts the steps of each optimizer, and loggers get this number",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)


def step_of_loggers(trainer: Trainer) -> int:
    """Return the step with which Lightning logs values in a training batch."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step
