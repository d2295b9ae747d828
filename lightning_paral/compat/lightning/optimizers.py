"""What Lightning puts in the place of an optimizer where there is none."""

from lightning.pytorch.core.optimizer import _MockOptimizer

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="lightning.pytorch.core.optimizer._MockOptimizer",
        purpose="to run ZeRO without an optimizer where configure_optimizers returns None",
        reason="trainer.optimizers holds an object of this class then",
        seen="lightning 2.6.6",
    ),
)


def is_none(optimizer: object) -> bool:
    """Whether `optimizer` is what Lightning puts in the place of one where `configure_optimizers` returns `None`."""
    return isinstance(optimizer, _MockOptimizer)
