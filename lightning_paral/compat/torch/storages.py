"""Identity and reference counts of storages."""

import torch
from torch import Tensor, UntypedStorage

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.UntypedStorage": {"_cdata": "distinguish storages without memory"},
    "torch._C": {"_storage_Use_Count": "know whether other tensors share the memory of a tensor"},
    "torch.storage.TypedStorage": {"._untyped_storage": "find the storages in a checkpoint as torch.save does"},
}


def identity_of(storage: UntypedStorage) -> int:
    """Return a number that identifies this storage as long as it exists."""
    identity: int = storage._cdata
    return identity


def use_count(tensor: Tensor) -> int:
    """Return the number of references to the storage of `tensor`: 2 if no other tensor shares it.

    The tensor itself and the storage object that this function creates count as one each.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def untyped(storage: object) -> UntypedStorage | None:
    """Return the untyped storage of `storage`, or `None` if it is not a storage."""
    found = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
    return found if isinstance(found, UntypedStorage) else None
