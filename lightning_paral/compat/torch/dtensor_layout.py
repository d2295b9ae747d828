"""Which part of a DTensor a rank holds."""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_paral.compat.private_name import PrivateName

__all__ = ["compute_local_shape_and_global_offset"]

NAMES = (
    PrivateName(
        name="torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        purpose="to save DTensors of any layout",
        reason="DTensor exposes its placements, but not the indices that this rank holds",
        seen="torch 2.11 to 2.13",
        parameters=("global_shape", "mesh", "placements"),
    ),
)
