"""Importing this module registers the rows of all themes."""

from tests.contract.user_code import (  # noqa: F401
    buffers,
    chains,
    derivatives,
    freezing,
    gradients,
    logs,
    loops,
    modules,
    networks,
    optimizers,
    pruning,
    reports,
    saving,
    steps,
    trained,
    updates,
    values,
)
