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
        purpose="to find out whether other tensors share the memory of one",
        reason="no public function counts them",
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
    """Return a number that is unique to this storage while it lives."""
    identity: int = storage._cdata
    return identity


def use_count(tensor: Tensor) -> int:
    """Return how many tensors and Python objects refer to the memory of `tensor`: 2 if no other tensor shares it.

    The tensor itself and the Python object created for the query count one each.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def untyped(storage: object) -> UntypedStorage | None:
    """Return the untyped storage of `storage`, or `None` if it is not a storage."""
    found = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
    return found if isinstance(found, UntypedStorage) else None
