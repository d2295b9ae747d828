"""How `torch.distributed.checkpoint` flattens a checkpoint into entries, and records their positions in files."""

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

from lightning_paral.compat.private_name import Names

__all__ = ["StorageInfo", "flatten_state_dict"]

NAMES: Names = {
    "torch.distributed.checkpoint._nested_dict": {
        "flatten_state_dict(state_dict)": "write the keys that Distributed Checkpoint expects",
    },
    "torch.distributed.checkpoint.filesystem": {
        "_StorageInfo(relative_path, offset, length)": "write the file `.metadata` of a sharded checkpoint",
    },
}
