"""The exceptions of this package. All derive from `ParalError`."""

from collections.abc import Iterator
from contextlib import contextmanager


class ParalError(Exception):
    """Base class of all exceptions of lightning_paral."""


class ConfigurationError(ParalError, ValueError):
    """The user's options or code cannot work. The message says what is wrong, what was given and what to do.

    It is raised as early as possible: when an object is created, when a run begins, or in the step that is at fault.
    """


class ReferenceFailedError(ConfigurationError):
    """`check` cannot compare anything, because the run in one process fails. The message has its error."""


class DifferenceError(ParalError, AssertionError):
    """`CheckReport.raise_if_different`: a run under a strategy differs from the run in one process, or fails."""


class ProcessGroupError(ParalError, RuntimeError):
    """The ranks could not form a process group, or a rank did not answer in time."""


class RankFailedError(ParalError, RuntimeError):
    """Another rank failed first, and this one ended because of it. The message names that rank and its error."""


class UnusedParametersError(ParalError, RuntimeError):
    """Some parameters got no gradient, or the ranks got gradients for different parameters or in different orders."""


class CheckpointError(ParalError, RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit the object into which it is loaded."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path. Also a `FileNotFoundError`, which Lightning raises in this case."""


class StorageOptionsError(ConfigurationError, TypeError):
    """`storage_options` were given but are not supported. Also a `TypeError`, which Lightning raises in this case."""


class PrivateNameError(ParalError, ImportError):
    """The installed torch, Lightning, torchmetrics or DeepSpeed lacks a private name that this package needs."""


@contextmanager
def explain_read_errors(path: object) -> Iterator[None]:
    """Replace unexpected errors inside the context by a `CheckpointError` that names the checkpoint.

    `ParalError` and `OSError` are not replaced.

    Raises:
        CheckpointError: `path` is damaged or not a checkpoint.
    """
    try:
        yield
    except (ParalError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {type(error).__name__}: {error}") from error
