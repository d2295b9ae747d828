"""The loaders of evaluations, before the loops have set them up."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
NAMES = tuple(
    PrivateName(
        name=f"lightning.pytorch.loops.{loop}._data_source",
        on_instances=True,
        purpose="to read the first batch before the run sets up its loaders",
        reason="the Trainer has no loaders until then",
        seen=_SEEN,
    )
    for loop in ("evaluation_loop._EvaluationLoop", "prediction_loop._PredictionLoop")
)


def evaluation_loaders(trainer: Trainer, function: TrainerFn) -> Any:
    """Return the loaders as the user's hook returns them, or as they were given to the Trainer.

    Args:
        trainer: the Trainer.
        function: `FITTING` for the loaders of the validation in a fit.
    """
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[function]._data_source.dataloader()
