"""Choose the checkpoint of a fit after the Trainer has started it."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.Trainer": {"._checkpoint_connector": "choose the checkpoint that a fit resumes from"},
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": {
        "resume_start(checkpoint_path, weights_only)": "choose the checkpoint that a fit resumes from",
    },
}


def choose_checkpoint(trainer: Trainer, choose: Callable[[Callable[[str], None]], None]) -> Callable[[], None]:
    """Let `choose` load a checkpoint at the start of the next fit, unless that fit has a `ckpt_path`.

    Call this in or before the `setup` hook of callbacks.

    Args:
        trainer: the Trainer.
        choose: called once, with a function that loads the checkpoint at a path. If this function raises, nothing has
            been restored, and it may be called again with another path. If it is not called, or raises each time, the
            fit does not resume.

    Returns:
        A function that undoes this. Calling it again, or after the checkpoint was chosen, has no effect.
    """
    connector: Any = trainer._checkpoint_connector
    load = connector.resume_start

    def undo() -> None:
        vars(connector).pop("resume_start", None)

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        undo()
        load(checkpoint_path, weights_only=weights_only)
        if checkpoint_path:
            return
        loaded = False

        def load_at(path: str) -> None:
            nonlocal loaded
            loaded = False
            load(path, weights_only=weights_only)
            loaded = True

        choose(load_at)
        if not loaded:
            load(None)  # forgets the path that could not be loaded

    shadow_method(connector, "resume_start", resume_start)
    return undo
