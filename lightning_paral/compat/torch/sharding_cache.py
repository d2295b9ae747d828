"""DTensor's cache of sharding propagation, which outlives the groups that its meshes are made of."""

from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_meshes() -> None:
    """Let DTensor forget the meshes it has seen.

    The result of an operation gets the mesh of the first operation of its kind (torch 2.13), and meshes find their
    groups by name. After the default group has been replaced, the names refer to nothing or to other groups.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
