"""Errors of others about divided tensors, in words of what to do, with what was said before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_paral.errors import ConfigurationError, ParalError

Explanation = Callable[[BaseException], str | None]
"""Returns what an error means; `None` if it is about something else."""

_KINDS = (RuntimeError, AssertionError, AttributeError)


@contextmanager
def explained(explanation: Explanation) -> Iterator[None]:
    """Say what it means that a step did what cannot be done with divided tensors.

    Raises:
        ConfigurationError: such an operation inside the block.
    """
    try:
        yield
    except _KINDS as error:
        meaning = _meaning(error, explanation)
        if meaning is None:
            raise
        raise ConfigurationError(meaning) from error


def explain(error: BaseException, explanation: Explanation) -> None:
    """Put what `error`, of a hook, means before what it says."""
    meaning = _meaning(error, explanation)
    if meaning is not None:
        error.args = (meaning,)


def _meaning(error: BaseException, explanation: Explanation) -> str | None:
    if not isinstance(error, _KINDS) or isinstance(error, ParalError):
        return None
    meaning = explanation(error)
    return None if meaning is None else f"{meaning}\ntorch: {error}"
