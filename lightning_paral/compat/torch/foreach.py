"""Operations on many tensors at once, which launch fewer CUDA kernels than a loop over the tensors."""

import torch

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch": {
        "_foreach_mul_": "scale sharded gradients",
        "_foreach_clamp_min_": "clip sharded gradients by value",
        "_foreach_clamp_max_": "clip sharded gradients by value",
        "_foreach_norm": "compute the norm of sharded gradients",
        "_amp_foreach_non_finite_check_and_unscale_": "unscale gradients as torch.amp.GradScaler does",
    },
}


def writes_in_place(name: str) -> bool:
    """Return whether torch's function `name` writes to DTensors in place without incrementing version counters."""
    return name.startswith("_foreach_") and name.endswith("_")


foreach_mul_ = torch._foreach_mul_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_norm = torch._foreach_norm
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
