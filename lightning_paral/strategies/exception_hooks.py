"""End a run also if a hook that Lightning calls after an exception raises: Lightning then skips the teardown."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

End = Callable[[BaseException], None]


def end_run_if_hooks_fail(trainer: Trainer, end: End) -> ExitStack:
    """Call `end` if `on_exception` of a callback or of the datamodule, or `finalize` of a logger, raises an error.

    Otherwise this rank would go on to watch a run that has ended, and end the process a minute later.

    Args:
        trainer: the Trainer of the run.
        end: a function that ends the run. It is called with the error.

    Returns:
        ExitStack: closing it removes the guard.
    """
    undo = ExitStack()
    owners = [(each, "on_exception") for each in (*vars(trainer)["callbacks"], vars(trainer).get("datamodule"))]
    for owner, name in (*owners, *((logger, "finalize") for logger in trainer.loggers)):
        attributes, method = getattr(owner, "__dict__", None), getattr(owner, name, None)
        if attributes is not None and method is not None:
            undo.callback(_restore, attributes, name, attributes.get(name))
            attributes[name] = _Guarded(method, end)
    return undo


def _restore(attributes: dict[str, Any], name: str, before: Any) -> None:
    attributes.pop(name, None)
    if before is not None:
        attributes[name] = before


class _Guarded:
    """A method that calls `end` if it raises. A copy of it is the method."""

    def __init__(self, method: Callable[..., Any], end: End) -> None:
        self._method, self._end = method, end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._method(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._method,)


def _itself(method: Any) -> Any:
    return method
