"""Check whether the user's code overrides certain hooks, to skip work that only those hooks need."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIGHTNING = ("lightning", "pytorch_lightning")


def has_hook(module: LightningModule, hooks: Iterable[str]) -> bool:
    """Return whether `module` or a callback of its Trainer overrides one of `hooks`; ignore Lightning's callbacks."""
    callbacks = [callback for callback in vars(module.trainer)["callbacks"] if _is_user_class(type(callback))]
    owners: list[tuple[object, type]] = [(module, LightningModule), *((callback, Callback) for callback in callbacks)]
    return any(is_overridden(hook, owner, base) for owner, base in owners for hook in hooks if hasattr(base, hook))


def _is_user_class(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _LIGHTNING
