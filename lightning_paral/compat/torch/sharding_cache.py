"""DTensor's cache of sharding propagation, which outlives the groups that its meshes are made of."""

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.distributed.tensor.debug._clear_sharding_prop_cache",
        purpose="to make DTensor forget the meshes of destroyed process groups",
        reason="no public function empties the cache, and destroy_process_group does not",
        seen="torch 2.11 to 2.13",
        parameters=(),
    ),
)


def forget_meshes() -> None:
    """Let DTensor forget the meshes it has seen.

    The result of an operation gets the mesh of the first operation of its kind (torch 2.13), and meshes find their
    groups by name. After the default group has been replaced, the names refer to nothing or to other groups.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
