"""The few kinds of error this package raises; every one derives from `ParalError`."""


class ParalError(Exception):
    """Base of all errors raised by lightning_paral."""


class ConfigurationError(ParalError, ValueError):
    """The user's code or options do not fit. The message says what is wrong, what was given and what to do.

    It is raised as early as possible: when an object is constructed, when a run starts, or in the step that is wrong.
    """


class ProcessGroupError(ParalError, RuntimeError):
    """The ranks could not be joined, or one of them did not answer in time."""


class UnusedParametersError(ParalError, RuntimeError):
    """Parameters took no part in the loss of the previous step, so their gradients never arrived."""


class CheckpointError(ParalError, RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit what it is loaded into."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path. It is a `FileNotFoundError`, too, as Lightning raises in this case."""


class StorageOptionsError(ConfigurationError, TypeError):
    """`storage_options` were given where none are taken. It is a `TypeError`, too, as Lightning raises in this case."""


class PrivateNameError(ParalError, ImportError):
    """The installed torch, Lightning, torchmetrics or DeepSpeed lacks a private name that this package needs."""
