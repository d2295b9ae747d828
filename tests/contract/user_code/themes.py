"""Importing this registers the rows of all themes."""

from tests.contract.user_code import buffers, gradients, optimizers, trained, updates  # noqa: F401
