"""What Lightning's loops have to be told under FSDP2."""

from lightning.pytorch import Trainer


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Let evaluation run under `no_grad`, as Lightning does for its own FSDP.

    Tensors made in inference mode, and parameters first gathered there are such, can never be trained with.
    """
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
