"""`DistributedDataParallel`: what it ignores, and the hooks of its reducer."""

from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.nn.parallel.DistributedDataParallel": {
        "._ddp_params_and_buffers_to_ignore": "ignore what a module tells DDP to ignore",
        "_check_reducer_finalized; _remove_autograd_hooks": "replace the reducer after a complete backward pass",
    },
}


# The parameters and buffers that a module tells `DistributedDataParallel` to ignore


def ignored_by_ddp(module: Module) -> set[str]:
    """Return the names of the parameters and buffers that `module` tells DDP to ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


# Remove the hooks of a `DistributedDataParallel`'s reducer from the parameters


def remove_reducer(model: DistributedDataParallel) -> None:
    """Remove the hooks of the reducer of `model` from its parameters.

    Raises:
        RuntimeError: the last backward pass did not produce all gradients.
    """
    wrapper: Any = model
    wrapper._check_reducer_finalized()
    wrapper._remove_autograd_hooks()
