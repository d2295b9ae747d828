"""Identity and reference counts of storages."""

import torch
from torch import Tensor, UntypedStorage

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.UntypedStorage._cdata",
        purpose="to distinguish storages without memory",
        reason="data_ptr is 0 for all of them, and each call of untyped_storage() creates a new Python object",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch._C._storage_Use_Count",
        purpose="to know whether other tensors share the memory of a tensor",
        reason="no public function counts the references to a storage",
        seen="torch 2.11 to 2.13",
    ),
    PrivateName(
        name="torch.storage.TypedStorage._untyped_storage",
        purpose="to find the storages in a checkpoint as torch.save does",
        reason="TypedStorage.untyped() warns that typed storages are deprecated",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)


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
