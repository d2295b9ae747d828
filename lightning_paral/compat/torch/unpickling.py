"""How `torch.load(weights_only=True)` maps Python 2 names."""

from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from lightning_paral.compat.private_name import PrivateName

__all__ = ["IMPORT_MAPPING", "NAME_MAPPING"]

NAMES = tuple(
    PrivateName(
        name=f"torch._utils.{name}",
        purpose="to accept in a checkpoint exactly what torch.load accepts",
        reason="torch.load maps names by these tables before it checks whether they are allowed",
        seen="torch 2.11 to 2.13",
    )
    for name in ("IMPORT_MAPPING", "NAME_MAPPING")
)
