"""Copies of a `DataLoader` that do not share its workers, and what its workers tell datasets."""

import copy
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "torch.utils.data.DataLoader": {"._iterator": "copy a loader without its persistent workers"},
    "torch.utils.data._utils.worker": {"_worker_info": "tell an iterable dataset which part of its samples to yield"},
}


def copy_without_workers(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a shallow copy of `loader` that starts its own workers, with `attributes` replaced.

    `DataLoader.__setattr__` rejects changes of attributes such as `batch_sampler`, and the constructor of a user's
    subclass may take unknown arguments.
    """
    changed = copy.copy(loader)
    changed.__dict__.update(attributes)
    replace(changed, "_iterator", None)
    return changed


def without_workers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a loader for pickling, without its workers."""
    return state | {"_iterator": None}


def set_worker_info(info: object) -> None:
    """Let `torch.utils.data.get_worker_info()` return `info` in this worker."""
    worker._worker_info = info  # type: ignore[assignment]
