"""The loops of a fit: what has been asked of them, and their loaders."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_INFERENCE_MODE = tuple(
    PrivateName(
        name=f"lightning.pytorch.loops.{kind}.inference_mode",
        on_instances=True,
        purpose="to evaluate without inference mode, whose tensors can never be trained with",
        reason="Trainer(inference_mode=...) is the user's, and a strategy has no say",
        seen=_SEEN,
    )
    for kind in ("_EvaluationLoop", "_PredictionLoop")
)
NAMES = (
    *_INFERENCE_MODE,
    PrivateName(
        name="lightning.pytorch.loops._FitLoop._should_accumulate",
        parameters=("self",),
        purpose="to know whether the backward pass is the last before a step",
        reason="Lightning tells strategies with a context manager, which has ended when the backward pass is over",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._FitLoop._combined_loader",
        on_instances=True,
        purpose="to begin the training data anew, at the position of a checkpoint",
        reason="trainer.train_dataloader gives the user's loaders without what draws from them",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops._FitLoop._data_fetcher",
        on_instances=True,
        purpose="to begin the training data anew, at the position of a checkpoint",
        reason="the fetcher has taken an iterator before the strategy knows the position",
        seen=_SEEN,
    ),
)


def is_accumulating(trainer: Trainer) -> bool:
    """Whether no optimizer step follows the current batch of a fit."""
    return trainer.fit_loop._should_accumulate()


def training_data_has_begun(trainer: Trainer) -> bool:
    """Whether the fit has loaders, and an iterator over them."""
    return trainer.fit_loop._data_fetcher is not None and trainer.fit_loop._combined_loader is not None


def begin_training_data_anew(trainer: Trainer) -> None:
    """Replace the iterator over the training loaders by a new one."""
    loop = trainer.fit_loop
    assert loop._combined_loader is not None
    assert loop._data_fetcher is not None
    loop._combined_loader.reset()
    iter(loop._data_fetcher)


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Let evaluation run under `no_grad`, as Lightning does for its own FSDP.

    Tensors made in inference mode, and parameters first gathered there are such, can never be trained with.
    """
    evaluation, prediction = _INFERENCE_MODE
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation.replace_on(loop, False)
    prediction.replace_on(trainer.predict_loop, False)


def call_once_after_setup_of_data(trainer: Trainer, then: Callable[[], None]) -> None:
    """Call `then` as soon as the fit that begins has its training loaders."""
    loop: Any = trainer.fit_loop

    def setup_data() -> None:
        vars(loop).pop("setup_data", None)
        loop.setup_data()
        then()

    vars(loop).pop("setup_data", None)  # of a run that failed before it had loaders
    shadow_method(loop, "setup_data", setup_data)
