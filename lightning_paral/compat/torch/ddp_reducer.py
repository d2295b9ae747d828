"""Take the reducer of a `DistributedDataParallel` off the parameters."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.private_name import PrivateName

_REASON = "DistributedDataParallel has no public way to end before the process does"

NAMES = (
    PrivateName(
        name="torch.nn.parallel.DistributedDataParallel._check_reducer_finalized",
        purpose="to find out whether the last backward pass brought all gradients",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("self",),
    ),
    PrivateName(
        name="torch.nn.parallel.DistributedDataParallel._remove_autograd_hooks",
        purpose="to give the parameters back after a run, without the reducer's hooks",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("self",),
    ),
)


def remove_reducer(model: DistributedDataParallel) -> None:
    """Take the reducer of `model` off its parameters.

    Raises:
        RuntimeError: torch's, if the last backward pass did not bring it all gradients.
    """
    wrapper: Any = model
    wrapper._check_reducer_finalized()
    wrapper._remove_autograd_hooks()
