"""Process groups that DeepSpeed creates on demand, and keeps in module-level variables."""

import torch.distributed as dist

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.process_groups import is_alive

NAMES: Names = {
    "deepspeed.utils.groups": {
        "_WORLD_GROUP": "destroy the process group that a run has left behind",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "destroy the process group that a run has left behind",
        "_ALL_TO_ALL_GROUP": "destroy the process group that a run has left behind",
        "_release_process_group_references(group)": "make DeepSpeed forget its destroyed process groups",
    },
}


def release_groups() -> None:
    """Destroy DeepSpeed's process groups that still exist, and make it forget all of them."""
    from deepspeed.utils import groups

    made = (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, *groups._ALL_TO_ALL_GROUP.values())
    for group in made:
        if is_alive(group):  # otherwise it was destroyed with an earlier default group
            dist.destroy_process_group(group)
    groups._release_process_group_references()
