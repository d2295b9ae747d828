"""The Trainer of a module, if it has one."""

from lightning.pytorch import LightningModule, Trainer


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer that `module` is attached to, or `None`."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:  # raised by Lightning if there is none
        return None
