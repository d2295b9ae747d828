"""Copies of a `DataLoader`, which leave its workers to it."""

import copy
from typing import Any

from torch.utils.data import DataLoader

from lightning_paral.compat.private_name import PrivateName

_ITERATOR = PrivateName(
    name="torch.utils.data.DataLoader._iterator",
    on_instances=True,
    purpose="to leave persistent workers to the loader that started them",
    reason="a copy and a pickle of a loader take them along, and nothing public tells a loader to let go of them",
    seen="torch 2.11 to 2.13",
)
NAMES = (_ITERATOR,)


def copy_without_workers(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a shallow copy with other attributes, that starts workers of its own.

    `DataLoader` refuses to set them; making another loader instead means to guess the arguments of a user's class.
    """
    changed = copy.copy(loader)
    changed.__dict__.update(attributes)
    _ITERATOR.replace_on(changed, None)
    return changed


def without_workers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a loader, as pickle takes them, without its workers."""
    return state | {"_iterator": None}
