"""The loaders of evaluations, before the loops have set them up."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": {
        "._data_source": "read the first batch before the run sets up its loaders",
    },
    "lightning.pytorch.loops.prediction_loop._PredictionLoop": {
        "._data_source": "read the first batch before the run sets up its loaders",
    },
}


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
