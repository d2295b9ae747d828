"""How `torch.distributed.checkpoint` flattens a checkpoint into entries, and records their positions in files."""

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

from lightning_paral.compat.private_name import PrivateName

__all__ = ["StorageInfo", "flatten_state_dict"]

NAMES = (
    PrivateName(
        name="torch.distributed.checkpoint._nested_dict.flatten_state_dict",
        purpose="to write the entries of a sharded checkpoint under the keys that Distributed Checkpoint expects",
        reason="the public planners flatten only while they plan a save, and support only certain tensor types",
        seen="torch 2.11 to 2.13",
        parameters=("state_dict",),
    ),
    PrivateName(
        name="torch.distributed.checkpoint.filesystem._StorageInfo",
        purpose="to write the file `.metadata` of a sharded checkpoint",
        reason="the file holds pickled objects of this class",
        seen="torch 2.11 to 2.13",
        parameters=("relative_path", "offset", "length"),
    ),
)
