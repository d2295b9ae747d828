"""How Lightning combines several loaders, and their batches."""

from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.pytree import tree_unflatten

NAMES: Names = {
    "lightning.pytorch.utilities.combined_loader.CombinedLoader": {
        "._mode": "know when a combination of loaders ends",
        "._spec": "find the item of each loader in a batch",
    },
    "torch.utils._pytree.TreeSpec": {"flatten_up_to": "find the item of each loader in a batch"},
}


def mode_of(combined: CombinedLoader) -> str:
    """Return `"sequential"`, `"min_size"`, `"max_size"` or `"max_size_cycle"`."""
    mode: str = combined._mode
    return mode


def items_of(combined: CombinedLoader, batch: Any) -> list[Any]:
    """Return the item of each loader in `batch`, in the order of `combined.flattened`."""
    items: list[Any] = combined._spec.flatten_up_to(batch)
    return items


def batch_of(combined: CombinedLoader, items: list[Any]) -> Any:
    """Return the batch that consists of `items`, one per loader in the order of `combined.flattened`."""
    return tree_unflatten(items, combined._spec)
