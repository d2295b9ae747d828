"""Names of process groups that some ranks create without the others."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.distributed_c10d": {
        "_process_group_name(ranks, use_hashed_name)": "name a process group that only its own ranks create",
    },
}


def new_named_group(
    name: str, ranks: Sequence[int], *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group without the ranks that are not in it. *Collective* over `ranks`.

    Args:
        name: a name that no other group of the default group has, equal on all `ranks`.
        ranks: the global ranks, which include that of this process.
        timeout: how long collectives may take; `None` for torch's default.
        backend: the backend; `None` for that of the default group.
    """
    before = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: GroupName(name)
    try:
        group: dist.ProcessGroup | None = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"lightning_paral: {name}",
        )
    finally:
        distributed_c10d._process_group_name = before
    assert group is not None
    return group
