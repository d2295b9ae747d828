"""The Trainer of a module, if it has one."""

from lightning.pytorch import LightningModule, Trainer


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer that `module` is attached to, or `None` if there is none."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:  # Lightning raises it if no Trainer is attached
        return None
