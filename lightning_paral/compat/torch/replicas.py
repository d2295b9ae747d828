"""Copies of modules without parameters, as `DataParallel` creates them."""

from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.nn.Module": {"_replicate_for_data_parallel": "copy a module without its parameters"},
}


def copy_without_values(module: Any) -> Module:
    """Return a copy of `module` that has copies of its dictionaries, but no parameters."""
    copy: Module = module._replicate_for_data_parallel()
    return copy
