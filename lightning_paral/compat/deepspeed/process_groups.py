"""Process groups that DeepSpeed makes as it needs them, and keeps in globals of a module."""

import torch.distributed as dist

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.process_groups import is_alive

_KEPT = "to destroy the process group that a run has left there"
_REASON = "deepspeed.comm.destroy_process_group wants the group, or takes torch's default group with all of them"

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
        purpose="to let DeepSpeed forget its process groups, which a next run must not meet",
        reason=_REASON,
        seen="deepspeed 0.19.8",
        parameters=("group",),
    ),
)


def release_groups() -> None:
    """Destroy DeepSpeed's process groups that are still there, and let it forget all of them."""
    from deepspeed.utils import groups

    made = (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, *groups._ALL_TO_ALL_GROUP.values())
    for group in made:
        if is_alive(group):  # else it went with an earlier default group
            dist.destroy_process_group(group)
    groups._release_process_group_references()
