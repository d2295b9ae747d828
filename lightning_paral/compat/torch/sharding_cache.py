"""DTensor's cache of sharding propagation, which outlives the process groups of its meshes."""

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.distributed.tensor.debug._clear_sharding_prop_cache",
        purpose="to make DTensor forget the meshes of destroyed process groups",
        reason="no public function clears the cache, and destroy_process_group does not",
        seen="torch 2.11 to 2.13",
        parameters=(),
    ),
)


def forget_meshes() -> None:
    """Clear DTensor's cache, which contains meshes.

    The result of an operation gets the cached mesh of the first operation with the same layouts (torch 2.13). Meshes
    find their groups by name: after the default group has been replaced, these names are unknown or refer to different
    groups.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
