"""Describe where in a run an error was raised, for error messages."""

import traceback

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn


def describe_position(trainer: Trainer, error: BaseException | None = None) -> str:
    """Return the part of the run that `trainer` is in, such as `training batch 3 of epoch 0 (global step 3)`.

    Args:
        trainer: the Trainer of the run.
        error: an error that ended the run. Its traceback shows whether the Trainer was saving a checkpoint.
    """
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    if "save_checkpoint" in functions:
        return f"saving a checkpoint at global step {trainer.global_step}"
    fn, stage = trainer.state.fn, trainer.state.stage
    if fn == TrainerFn.FITTING and stage == RunningStage.TRAINING and trainer.train_dataloader is not None:
        batch, epoch = trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch
        return f"training batch {max(0, batch)} of epoch {epoch} (global step {trainer.global_step})"
    if fn == TrainerFn.FITTING and stage is not None and stage != RunningStage.TRAINING:
        return f"{stage.value} during fit (global step {trainer.global_step})".replace("_", " ")
    return f"the setup of {fn.value}" if fn is not None else "the run"
