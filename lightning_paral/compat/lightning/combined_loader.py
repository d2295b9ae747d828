"""How Lightning combines several loaders, and their batches."""

from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.pytree import tree_unflatten

_SEEN = "lightning 2.6.1 to 2.6.6"
NAMES = (
    PrivateName(
        name="lightning.pytorch.utilities.combined_loader.CombinedLoader._mode",
        on_instances=True,
        purpose="to know when a combination of loaders ends",
        reason="the class has no public attribute for its mode",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.utilities.combined_loader.CombinedLoader._spec",
        on_instances=True,
        purpose="to find the item of each loader in a batch",
        reason="no public function lists the items of a batch in the order of CombinedLoader.flattened",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.utils._pytree.TreeSpec.flatten_up_to",
        purpose="to find the item of each loader in a batch",
        reason="Lightning stores the structure of the loaders as an object of this private class",
        seen="torch 2.11 to 2.13",
    ),
)


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
