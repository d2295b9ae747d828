"""Remove the hooks of a `DistributedDataParallel`'s reducer from the parameters."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.nn.parallel.DistributedDataParallel": {
        "_check_reducer_finalized": "check that the last backward pass produced all gradients",
        "_remove_autograd_hooks": "remove the reducer's hooks from the parameters after a run",
    },
}


def remove_reducer(model: DistributedDataParallel) -> None:
    """Remove the hooks of the reducer of `model` from its parameters.

    Raises:
        RuntimeError: the last backward pass did not produce all gradients.
    """
    wrapper: Any = model
    wrapper._check_reducer_finalized()
    wrapper._remove_autograd_hooks()
