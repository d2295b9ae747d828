"""The shape and offset of a rank's shard of a DTensor."""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_paral.compat.private_name import PrivateName

__all__ = ["compute_local_shape_and_global_offset"]

NAMES = (
    PrivateName(
        name="torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        purpose="to save DTensors of any layout",
        reason="DTensor has public placements, but no public name gives the offsets of this rank's shard",
        seen="torch 2.11 to 2.13",
        parameters=("global_shape", "mesh", "placements"),
    ),
)
