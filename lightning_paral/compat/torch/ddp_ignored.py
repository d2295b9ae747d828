"""The parameters and buffers that a module tells `DistributedDataParallel` to ignore."""

from torch.nn import Module

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.nn.parallel.DistributedDataParallel": {
        "._ddp_params_and_buffers_to_ignore": "ignore what a module tells DDP to ignore",
    },
}


def ignored_by_ddp(module: Module) -> set[str]:
    """Return the names of the parameters and buffers that `module` tells DDP to ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
