"""The Trainer of a user's module, and whether the user's code overrides certain hooks."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIGHTNING = ("lightning", "pytorch_lightning")


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer that `module` is attached to, or `None` if there is none."""
    try:
        return None if module is None else module.trainer
    except RuntimeError:  # Lightning raises it if no Trainer is attached
        return None


def has_hook(module: LightningModule, hooks: Iterable[str], trainer: Trainer | None = None) -> bool:
    """Return whether `module` or a callback of its Trainer overrides one of `hooks`; ignore Lightning's callbacks.

    Args:
        module: the module.
        hooks: names of hooks.
        trainer: the Trainer, if `module` is not attached to it yet.
    """
    trainer = module.trainer if trainer is None else trainer
    callbacks = [callback for callback in vars(trainer)["callbacks"] if _is_user_class(type(callback))]
    owners: list[tuple[object, type]] = [(module, LightningModule), *((callback, Callback) for callback in callbacks)]
    return any(is_overridden(hook, owner, base) for owner, base in owners for hook in hooks if hasattr(base, hook))


def _is_user_class(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _LIGHTNING


def is_built_later(module: LightningModule, trainer: Trainer) -> bool:
    """Return whether hooks may build a part of `module` after the processes have started."""
    return has_hook(module, ("configure_model", "configure_sharded_model", "setup"), trainer)
