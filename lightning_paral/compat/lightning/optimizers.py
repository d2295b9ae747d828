"""The placeholder that Lightning uses if there is no optimizer."""

from lightning.pytorch.core.optimizer import _MockOptimizer

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="lightning.pytorch.core.optimizer._MockOptimizer",
        purpose="to run ZeRO without an optimizer if configure_optimizers returns None",
        reason="trainer.optimizers then contains an object of this class, which has no public name",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)


def is_mock_optimizer(optimizer: object) -> bool:
    """Return whether `optimizer` is Lightning's placeholder for a `configure_optimizers` that returns `None`."""
    return isinstance(optimizer, _MockOptimizer)
