"""Which hooks the user's code has: what is done for their sake is left out where there are none."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIGHTNING = ("lightning", "pytorch_lightning")
_BETWEEN_BACKWARD_AND_STEP = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_MODULES = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward")


def has_hook(module: LightningModule, hooks: Iterable[str]) -> bool:
    """Whether `module`, or a callback of its Trainer that is not Lightning's own, overrides one of `hooks`."""
    callbacks = [each for each in vars(module.trainer)["callbacks"] if _is_users(type(each))]
    owners: list[tuple[object, type]] = [(module, LightningModule), *((callback, Callback) for callback in callbacks)]
    return any(is_overridden(hook, owner, base) for owner, base in owners for hook in hooks if hasattr(base, hook))


def may_change_gradients(module: LightningModule) -> bool:
    """Whether code of the user's runs between a backward pass and the step of the optimizer."""
    between = (*_BETWEEN_BACKWARD_AND_STEP, *_OF_MODULES)
    return not module.automatic_optimization or has_hook(module, between)


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIGHTNING
