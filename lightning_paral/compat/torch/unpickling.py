"""The tables with which `torch.load(weights_only=True)` maps Python 2 names to Python 3."""

from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from lightning_paral.compat.private_name import Names

__all__ = ["IMPORT_MAPPING", "NAME_MAPPING"]

NAMES: Names = {
    "torch._utils": {
        "IMPORT_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
        "NAME_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
    },
}
