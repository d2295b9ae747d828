"""The tables with which `torch.load(weights_only=True)` maps Python 2 names to Python 3."""

from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from lightning_paral.compat.private_name import PrivateName

__all__ = ["IMPORT_MAPPING", "NAME_MAPPING"]

NAMES = tuple(
    PrivateName(
        name=f"torch._utils.{name}",
        purpose="to accept exactly the names in a checkpoint that torch.load accepts",
        reason="torch.load maps names with this table before it checks them, and no public name gives the table",
        seen="torch 2.11 to 2.13",
    )
    for name in ("IMPORT_MAPPING", "NAME_MAPPING")
)
