"""Copies of a `DataLoader` that do not share its workers."""

import copy
from typing import Any

from torch.utils.data import DataLoader

from lightning_paral.compat.private_name import PrivateName

_ITERATOR = PrivateName(
    name="torch.utils.data.DataLoader._iterator",
    on_instances=True,
    purpose="to leave persistent workers to the loader that started them",
    reason="a copy or pickle of a loader includes them, and no public method detaches them",
    seen="torch 2.11 to 2.13",
)
NAMES = (_ITERATOR,)


def copy_without_workers(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a shallow copy with other attributes that starts its own workers.

    `DataLoader` refuses to set them, and building another loader would mean guessing a user class's arguments.
    """
    changed = copy.copy(loader)
    changed.__dict__.update(attributes)
    _ITERATOR.replace_on(changed, None)
    return changed


def without_workers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a loader for pickling, without its workers."""
    return state | {"_iterator": None}
