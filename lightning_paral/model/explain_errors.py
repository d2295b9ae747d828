"""Explain errors that torch raises for sharded tensors: first the cause and the remedy, then torch's message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_paral.errors import ConfigurationError, ParalError

Explanation = Callable[[BaseException], str | None]
"""Takes an error; returns its explanation, or `None` if the error has another cause."""

_EXPLAINED = (RuntimeError, AssertionError, AttributeError)


@contextmanager
def explain_errors(explanation: Explanation) -> Iterator[None]:
    """Replace those errors raised in the block that `explanation` explains.

    Raises:
        ConfigurationError: the explanation; the original error is its `__cause__`.
    """
    try:
        yield
    except _EXPLAINED as error:
        meaning = _meaning(error, explanation)
        if meaning is None:
            raise
        raise ConfigurationError(meaning) from error


def explain(error: BaseException, explanation: Explanation) -> None:
    """Prepend the explanation of `error`, if there is one, to its message, in place."""
    meaning = _meaning(error, explanation)
    if meaning is not None:
        error.args = (meaning,)


def _meaning(error: BaseException, explanation: Explanation) -> str | None:
    if not isinstance(error, _EXPLAINED) or isinstance(error, ParalError):
        return None
    meaning = explanation(error)
    return None if meaning is None else f"{meaning}\ntorch: {error}"
