"""Find out which hooks the user's code overrides, to skip work that only serves those hooks."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIGHTNING = ("lightning", "pytorch_lightning")


def has_hook(module: LightningModule, hooks: Iterable[str]) -> bool:
    """Return whether `module`, or a callback of its Trainer that is not Lightning's own, overrides one of `hooks`."""
    callbacks = [each for each in vars(module.trainer)["callbacks"] if _is_users(type(each))]
    owners: list[tuple[object, type]] = [(module, LightningModule), *((callback, Callback) for callback in callbacks)]
    return any(is_overridden(hook, owner, base) for owner, base in owners for hook in hooks if hasattr(base, hook))


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIGHTNING
