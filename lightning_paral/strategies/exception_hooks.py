"""End a run also if a hook that Lightning calls after an exception raises: Lightning then skips the teardown."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.methods import shadow_method


def end_run_if_hooks_fail(trainer: Trainer, teardown: Callable[[], None]) -> ExitStack:
    """Call `teardown` if `on_exception` of a callback or of the datamodule, or `finalize` of a logger, raises an error.

    Otherwise this rank would go on to watch a run that has ended, and end the process a minute later.

    Returns:
        ExitStack: closing it removes the guard.
    """
    undo = ExitStack()
    owners = [(each, "on_exception") for each in (*vars(trainer)["callbacks"], vars(trainer).get("datamodule"))]
    for owner, name in (*owners, *((logger, "finalize") for logger in trainer.loggers)):
        if owner is not None and name not in vars(owner):  # else it is the guard of a strategy's own replacement
            shadow_method(owner, name, _Guarded(getattr(owner, name), teardown), undo)
    return undo


class _Guarded:
    """A method that calls `teardown` if it raises. A copy of it is the method."""

    def __init__(self, method: Callable[..., Any], teardown: Callable[[], None]) -> None:
        self._method, self._teardown = method, teardown

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._method(*args, **kwargs)
        except BaseException:
            self._teardown()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._method.__self__, self._method.__name__)  # type: ignore[attr-defined]
