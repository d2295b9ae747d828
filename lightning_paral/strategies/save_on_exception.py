"""Let callbacks that save a checkpoint on an exception do so only if all ranks failed."""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

Save = Callable[[Callback, Trainer, LightningModule, BaseException], None]


def replace_on_exception(callbacks: Iterable[Callback], save: Save) -> None:
    """Call `save` in place of `on_exception` of those `callbacks` that save on an exception."""
    for callback in callbacks:
        if getattr(callback, "save_on_exception", True):
            vars(callback)["on_exception"] = _OnException(save, callback)


def restore_on_exception(callbacks: Iterable[Callback]) -> None:
    """Undo `replace_on_exception`."""
    for callback in callbacks:
        replaced = vars(callback).get("on_exception")
        if isinstance(replaced, _OnException):
            del vars(callback)["on_exception"]
            vars(callback).update(replaced.before)


class _OnException:
    """Replaces the method `on_exception` of one callback. A copy of the callback has the method of its class."""

    def __init__(self, save: Save, callback: Callback) -> None:
        self._save = save
        self._callback = callback
        self.before = {name: value for name, value in vars(callback).items() if name == "on_exception"}
        """The method of the instance, if it has one of its own, such as that of a `LambdaCallback`."""

    def __call__(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the strategy decide whether the callback saves."""
        self._save(self._callback, trainer, pl_module, exception)

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodType, (type(self._callback).on_exception, self._callback)
