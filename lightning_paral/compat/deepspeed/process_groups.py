"""Process groups that DeepSpeed creates on demand, and keeps in module-level variables."""

import torch.distributed as dist

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.process_groups import is_alive

_KEPT = "to destroy the process group that a run has left behind"
_REASON = (
    "deepspeed.comm.destroy_process_group destroys a given group, but no public name gives this one; without a group, "
    "it destroys all groups, including torch's default group"
)

NAMES = (
    PrivateName(
        name="deepspeed.utils.groups._WORLD_GROUP",
        purpose=_KEPT,
        reason=_REASON,
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP",
        purpose=_KEPT,
        reason=_REASON,
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.utils.groups._ALL_TO_ALL_GROUP",
        purpose=_KEPT,
        reason=_REASON,
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.utils.groups._release_process_group_references",
        purpose="to make DeepSpeed forget its destroyed process groups, which the next run must not use",
        reason="deepspeed.comm.destroy_process_group forgets only groups that it destroys itself",
        seen="deepspeed 0.19.8",
        parameters=("group",),
    ),
)


def release_groups() -> None:
    """Destroy DeepSpeed's process groups that still exist, and make it forget all of them."""
    from deepspeed.utils import groups

    made = (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, *groups._ALL_TO_ALL_GROUP.values())
    for group in made:
        if is_alive(group):  # otherwise it was destroyed with an earlier default group
            dist.destroy_process_group(group)
    groups._release_process_group_references()
