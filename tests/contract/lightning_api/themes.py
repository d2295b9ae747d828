"""Importing this module registers the rows of all themes."""

from tests.contract.lightning_api import (  # noqa: F401
    arguments,
    callbacks,
    checkpoints,
    data,
    hooks,
    loggers,
    modules,
    running,
    tuning,
)
