"""`self.device` of LightningModules and of metrics of Lightning's."""

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin, _update_properties
from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_MIXIN = "lightning.fabric.utilities.device_dtype_mixin"
_DEVICE = PrivateName(
    name=f"{_MIXIN}._DeviceDtypeModuleMixin._device",
    on_instances=True,
    purpose="to let self.device of a replica be the replica's device",
    reason="the public property device has no setter, and to(device) would move parameters",
    seen=_SEEN,
)
NAMES = (
    _DEVICE,
    PrivateName(
        name=f"{_MIXIN}._update_properties",
        parameters=("root", "device"),
        purpose="to let self.device be the device that a sharded module computes on",
        reason="the public property device has no setter, and to(device) would move parameters",
        seen=_SEEN,
    ),
)


def set_device(module: Module, device: torch.device) -> None:
    """Let `device` of `module` itself, if it has that property, return `device`; nothing is moved."""
    if isinstance(module, _DeviceDtypeModuleMixin):
        if "_device" not in module.__dict__:
            _DEVICE.replace_on(module, device)  # raises
        module.__dict__["_device"] = device  # in each step of a replica: Module.__setattr__ would take long


def set_device_everywhere(root: Module, device: torch.device) -> None:
    """Let `device` of `root` and of all modules in it that have the property return `device`; nothing is moved."""
    _update_properties(root, device=device)
