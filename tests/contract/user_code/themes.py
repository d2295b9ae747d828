"""Importing this module registers the rows of all themes."""

from tests.contract.user_code import (  # noqa: F401
    buffers,
    derivatives,
    freezing,
    gradients,
    logs,
    loops,
    modules,
    optimizers,
    pruning,
    reports,
    saving,
    trained,
    updates,
)
