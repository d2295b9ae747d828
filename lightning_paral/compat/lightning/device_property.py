"""The property `device` of LightningModules and other modules of Lightning."""

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin, _update_properties
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_MIXIN = "lightning.fabric.utilities.device_dtype_mixin"
_DEVICE = PrivateName(
    name=f"{_MIXIN}._DeviceDtypeModuleMixin._device",
    on_instances=True,
    purpose="to make self.device of a replica return the replica's device",
    reason="the public property device has no setter, and to(device) would move parameters",
    seen=_SEEN,
)
NAMES = (
    _DEVICE,
    PrivateName(
        name=f"{_MIXIN}._update_properties",
        parameters=("root", "device"),
        purpose="to make self.device return the device that a sharded module computes on",
        reason="the public property device has no setter, and to(device) would move parameters",
        seen=_SEEN,
    ),
)


def set_device(module: Module, device: torch.device) -> None:
    """Make the property `device` of `module` itself, if it has one, return `device`; nothing is moved."""
    if isinstance(module, _DeviceDtypeModuleMixin):
        if "_device" not in module.__dict__:
            _DEVICE.replace_on(module, device)  # raises a PrivateNameError
        module.__dict__["_device"] = (
            device  # not by Module.__setattr__, which is too slow for each replica in each step
        )


def set_device_everywhere(root: Module, device: torch.device) -> None:
    """Make the property `device` of `root` and its submodules return `device`; nothing is moved."""
    _update_properties(root, device=device)
