"""The parameters and buffers that a module tells `DistributedDataParallel` to ignore."""

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
        purpose="to ignore the parameters and buffers that a module tells DDP to ignore",
        reason="modules set an attribute of this name, and DDP has no public equivalent",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)


def ignored_by_ddp(module: Module) -> set[str]:
    """Return the names of the parameters and buffers that `module` tells DDP to ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
