"""The placeholder that Lightning uses if there is no optimizer."""

from lightning.pytorch.core.optimizer import _MockOptimizer

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.core.optimizer": {
        "_MockOptimizer": "run ZeRO without an optimizer if configure_optimizers returns None",
    },
}


def is_mock_optimizer(optimizer: object) -> bool:
    """Return whether `optimizer` is Lightning's placeholder for a `configure_optimizers` that returns `None`."""
    return isinstance(optimizer, _MockOptimizer)
