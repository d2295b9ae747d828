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
        purpose="to find what each loader contributed to a batch",
        reason="CombinedLoader.flattened lists loaders in an order that no public function applies to batches",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.utils._pytree.TreeSpec.flatten_up_to",
        purpose="to find what each loader contributed to a batch",
        reason="Lightning keeps the structure of the loaders as an object of this class",
        seen="torch 2.11 to 2.13",
    ),
)


def mode_of(combined: CombinedLoader) -> str:
    """Return `"sequential"`, `"min_size"`, `"max_size"` or `"max_size_cycle"`."""
    mode: str = combined._mode
    return mode


def items_of(combined: CombinedLoader, batch: Any) -> list[Any]:
    """Return what each loader contributed to `batch`, in the order of `combined.flattened`."""
    items: list[Any] = combined._spec.flatten_up_to(batch)
    return items


def batch_of(combined: CombinedLoader, items: list[Any]) -> Any:
    """Return the batch made of one item per loader."""
    return tree_unflatten(items, combined._spec)
