"""The hooks and gradient clipping that a precision plugin of Lightning runs between an optimizer's closure and step."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.plugins.Precision": {
        "_after_closure(model, optimizer)": "run hooks and clipping before the step of a sharded optimizer",
    },
}


def after_closure(plugin: Precision, module: LightningModule, optimizer: Any) -> None:
    """Run the `on_before_optimizer_step` hooks, and clip gradients as configured in the Trainer."""
    plugin._after_closure(module, optimizer)
