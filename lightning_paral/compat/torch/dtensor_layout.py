"""Where what a rank holds of a DTensor lies in the whole."""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_paral.compat.private_name import PrivateName

__all__ = ["compute_local_shape_and_global_offset"]

NAMES = (
    PrivateName(
        name="torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        purpose="to save DTensors of any layout",
        reason="DTensor tells its placements, and not which indices they give this rank",
        seen="torch 2.11 to 2.13",
        parameters=("global_shape", "mesh", "placements"),
    ),
)
