"""The names of Python 2 in files of `torch.save`."""

from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from lightning_paral.compat.private_name import Names

__all__ = [
    "IMPORT_MAPPING",
    "NAME_MAPPING",
]

NAMES: Names = {
    "torch._utils": {
        "IMPORT_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
        "NAME_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
    },
}
