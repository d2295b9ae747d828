"""How `torch.distributed.checkpoint` records the positions of entries in files."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

from lightning_paral.compat.private_name import Names

__all__ = ["StorageInfo"]

NAMES: Names = {
    "torch.distributed.checkpoint.filesystem": {
        "_StorageInfo(relative_path, offset, length)": "write the file `.metadata` of a sharded checkpoint",
    },
}
