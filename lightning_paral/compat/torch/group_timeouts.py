"""The timeout of process groups that are created without one."""

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import distributed_c10d

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.distributed.distributed_c10d": {
        "_get_default_timeout(backend)": "give the run's timeout to groups that are created without one",
    },
}


def use_default_timeout(timeout: timedelta) -> Callable[[], None]:
    """Create groups with `timeout`, unless the caller passes another one. Return a function that undoes this."""
    before = distributed_c10d._get_default_timeout

    def run_timeout(backend: object) -> timedelta:
        return timeout

    def undo() -> None:
        if distributed_c10d._get_default_timeout is run_timeout:
            distributed_c10d._get_default_timeout = before

    distributed_c10d._get_default_timeout = run_timeout
    return undo
