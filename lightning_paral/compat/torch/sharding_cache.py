"""DTensor's cache of sharding propagation, which outlives the process groups of its meshes."""

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.tensor.debug": {
        "_clear_sharding_prop_cache": "make DTensor forget the meshes of destroyed process groups",
    },
}


def forget_meshes() -> None:
    """Clear DTensor's cache, which contains meshes.

    The result of an operation gets the cached mesh of the first operation with the same layouts (torch 2.13). Meshes
    find their groups by name: after the default group has been replaced, these names are unknown or refer to different
    groups.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
