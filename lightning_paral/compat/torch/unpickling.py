"""What `torch.load(weights_only=True)` takes the names of Python 2 for."""

from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from lightning_paral.compat.private_name import PrivateName

__all__ = ["IMPORT_MAPPING", "NAME_MAPPING"]

NAMES = tuple(
    PrivateName(
        name=f"torch._utils.{name}",
        purpose="to admit in a checkpoint what torch.load will admit, and nothing else",
        reason="torch.load replaces names by these tables before it looks whether they are admitted",
        seen="torch 2.11 to 2.13",
    )
    for name in ("IMPORT_MAPPING", "NAME_MAPPING")
)
