"""How Lightning joins several loaders, and the batches that it makes of theirs."""

from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.pytree import tree_unflatten

_SEEN = "lightning 2.6.1 to 2.6.6"
NAMES = (
    PrivateName(
        name="lightning.pytorch.utilities.combined_loader.CombinedLoader._mode",
        on_instances=True,
        purpose="to know when several loaders end together",
        reason="the class does not tell the mode that it was given",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.utilities.combined_loader.CombinedLoader._spec",
        on_instances=True,
        purpose="to find in a batch what each loader gave",
        reason="CombinedLoader.flattened lists loaders in an order that nothing public applies to batches",
        seen=_SEEN,
    ),
    PrivateName(
        name="torch.utils._pytree.TreeSpec.flatten_up_to",
        purpose="to find in a batch what each loader gave",
        reason="Lightning keeps the structure of the loaders in this module's terms",
        seen="torch 2.11 to 2.13",
    ),
)


def mode_of(combined: CombinedLoader) -> str:
    """Return `"sequential"`, `"min_size"`, `"max_size"` or `"max_size_cycle"`."""
    mode: str = combined._mode
    return mode


def items_of(combined: CombinedLoader, batch: Any) -> list[Any]:
    """Return what each of the loaders gave for `batch`, in the order of `combined.flattened`."""
    items: list[Any] = combined._spec.flatten_up_to(batch)
    return items


def batch_of(combined: CombinedLoader, items: list[Any]) -> Any:
    """Return the batch that the loaders' `items` make."""
    return tree_unflatten(items, combined._spec)
