"""The state and the loaders of the Trainer's loops."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "lightning.pytorch.loops._EvaluationLoop": {
        ".inference_mode": "evaluate without inference mode, whose tensors can never be trained",
    },
    "lightning.pytorch.loops._PredictionLoop": {
        ".inference_mode": "evaluate without inference mode, whose tensors can never be trained",
    },
    "lightning.pytorch.loops._FitLoop": {
        "_should_accumulate": "know whether a backward pass is the last one before an optimizer step",
        "._combined_loader": "restart the training data at the position of a checkpoint",
        "._data_fetcher": "restart the training data at the position of a checkpoint",
    },
}


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether the current training batch ends without an optimizer step."""
    return trainer.fit_loop._should_accumulate()


def training_data_has_started(trainer: Trainer) -> bool:
    """Return whether the fit has created its loaders and an iterator over them."""
    return trainer.fit_loop._data_fetcher is not None and trainer.fit_loop._combined_loader is not None


def restart_training_data(trainer: Trainer) -> None:
    """Replace the iterator over the training loaders with a new one."""
    loop = trainer.fit_loop
    assert loop._combined_loader is not None
    assert loop._data_fetcher is not None
    loop._combined_loader.reset()
    iter(loop._data_fetcher)


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Run evaluation under `no_grad` instead of inference mode, as Lightning does for its own FSDP.

    Parameters that are first gathered in inference mode would be inference tensors, which can never be trained.
    """
    evaluation = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
    for loop in (*evaluation, trainer.predict_loop):
        replace(loop, "inference_mode", False)


def call_once_after_setup_of_data(trainer: Trainer, then: Callable[[], None]) -> None:
    """Call `then` once, as soon as the fit that is starting has created its training loaders."""
    loop: Any = trainer.fit_loop

    def setup_data() -> None:
        vars(loop).pop("setup_data", None)
        loop.setup_data()
        then()

    vars(loop).pop("setup_data", None)  # left by a run that failed before it created loaders
    shadow_method(loop, "setup_data", setup_data)
