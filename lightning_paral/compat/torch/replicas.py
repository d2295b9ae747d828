"""Copies of modules without parameters, as `DataParallel` creates them."""

from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.nn.Module._replicate_for_data_parallel",
        purpose="to copy a module without its parameters",
        reason="torch.nn.parallel.replicate also copies parameters, and fails for modules that refer to other modules",
        seen="torch 2.11 to 2.13",
        parameters=("self",),
    ),
)


def copy_without_values(module: Any) -> Module:
    """Return a copy of `module` that has copies of its dictionaries, but no parameters."""
    copy: Module = module._replicate_for_data_parallel()
    return copy
