"""Explain errors that torch raises about sharded tensors: what they mean, what to do, then torch's message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_paral.errors import ConfigurationError, ParalError

Explanation = Callable[[BaseException], str | None]
"""Returns an explanation of an error; `None` if the error is about something else."""

_KINDS = (RuntimeError, AssertionError, AttributeError)


@contextmanager
def explain_errors(explanation: Explanation) -> Iterator[None]:
    """Replace an error inside the block that `explanation` knows.

    Raises:
        ConfigurationError: with the explanation, from the original error.
    """
    try:
        yield
    except _KINDS as error:
        meaning = _meaning(error, explanation)
        if meaning is None:
            raise
        raise ConfigurationError(meaning) from error


def explain(error: BaseException, explanation: Explanation) -> None:
    """Put the explanation of `error` before its message, in place."""
    meaning = _meaning(error, explanation)
    if meaning is not None:
        error.args = (meaning,)


def _meaning(error: BaseException, explanation: Explanation) -> str | None:
    if not isinstance(error, _KINDS) or isinstance(error, ParalError):
        return None
    meaning = explanation(error)
    return None if meaning is None else f"{meaning}\ntorch: {error}"
