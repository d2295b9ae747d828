"""The property `device` of LightningModules and other modules of Lightning."""

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin, _update_properties
from torch.nn import Module

from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin": {
        "._device": "make self.device of a replica return the replica's device",
    },
    "lightning.fabric.utilities.device_dtype_mixin": {
        "_update_properties(root, device)": "make self.device return the device that computes",
    },
}


def set_device(module: Module, device: torch.device) -> None:
    """Make the property `device` of `module` itself, if it has one, return `device`; nothing is moved."""
    if isinstance(module, _DeviceDtypeModuleMixin):
        if "_device" not in module.__dict__:
            replace(module, "_device", device)  # raises a PrivateNameError
        # `Module.__setattr__` would be too slow: this runs for each replica in each step.
        module.__dict__["_device"] = device


def set_device_everywhere(root: Module, device: torch.device) -> None:
    """Make the property `device` of `root` and its submodules return `device`; nothing is moved."""
    _update_properties(root, device=device)
