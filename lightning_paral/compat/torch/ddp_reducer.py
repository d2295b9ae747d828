"""Remove the hooks of a `DistributedDataParallel`'s reducer from the parameters."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.private_name import PrivateName

_REASON = "DistributedDataParallel has no public way to remove its hooks"

NAMES = (
    PrivateName(
        name="torch.nn.parallel.DistributedDataParallel._check_reducer_finalized",
        purpose="to check that the last backward pass produced all gradients",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("self",),
    ),
    PrivateName(
        name="torch.nn.parallel.DistributedDataParallel._remove_autograd_hooks",
        purpose="to remove the reducer's hooks from the parameters after a run",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("self",),
    ),
)


def remove_reducer(model: DistributedDataParallel) -> None:
    """Remove the hooks of the reducer of `model` from its parameters.

    Raises:
        RuntimeError: the last backward pass did not produce all gradients.
    """
    wrapper: Any = model
    wrapper._check_reducer_finalized()
    wrapper._remove_autograd_hooks()
