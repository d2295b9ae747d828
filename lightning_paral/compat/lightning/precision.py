"""The hooks and gradient clipping that a precision plugin of Lightning runs between an optimizer's closure and step."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="lightning.pytorch.plugins.Precision._after_closure",
        parameters=("model", "optimizer"),
        purpose="to run on_before_optimizer_step and gradient clipping before the step of a sharded optimizer",
        reason="Lightning calls them only from its own optimizer_step, which passes the optimizer a closure",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)


def after_closure(plugin: Precision, module: LightningModule, optimizer: Any) -> None:
    """Run the `on_before_optimizer_step` hooks, and clip gradients as configured in the Trainer."""
    plugin._after_closure(module, optimizer)
