"""Strategies, launchers and plugins of Lightning."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import DeepSpeedPrecision, DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt as call_and_handle_interrupt
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.compat.private_name import Names, replace

__all__ = [
    "LightningSubprocessLauncher",
    "SubprocessScriptLauncher",
    "TunerExit",
    "call_and_handle_interrupt",
]

NAMES: Names = {
    "lightning.pytorch.strategies.ParallelStrategy": {
        "._layer_sync": "know whether Trainer(sync_batchnorm=True) was set",
    },
    "lightning.pytorch.LightningModule": {"._device_mesh": "make self.device_mesh return the strategy's mesh"},
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector": {
        "_lazy_init_strategy": "give a strategy that is chosen late its devices and plugins",
        ".use_distributed_sampler": "know the value of Trainer(use_distributed_sampler=...)",
    },
    "lightning.pytorch.Trainer": {"._accelerator_connector": "reach the object that holds the strategy"},
    "lightning.pytorch.loops.fit_loop._FitLoop": {
        "._data_source": "read the first training batch before the run sets up its loaders",
    },
    "lightning.pytorch.strategies.launchers": {
        "_SubprocessScriptLauncher(cluster_environment, num_processes, num_nodes)": "check before processes start",
    },
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": {
        "_call_children_scripts": "take the processes over before Lightning's observer knows them",
    },
    "lightning.pytorch.trainer.call": {
        "_call_and_handle_interrupt(trainer, trainer_fn)": "call the hooks for exceptions in forked ranks",
    },
    "lightning.pytorch.utilities.exceptions": {
        "_TunerExitException": "tell the end of a search for a learning rate or a batch size from a failure",
    },
    "lightning.pytorch.plugins.Precision": {
        "_after_closure(model, optimizer)": "run hooks and clipping before the step of a sharded optimizer",
    },
    "lightning.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin": {
        "._device": "make self.device return the device that computes",
    },
}


# Private attributes of Lightning's strategies that our strategies read or set


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """Return the plugin that synchronizes BatchNorm layers, or `None` without `Trainer(sync_batchnorm=True)`."""
    return strategy._layer_sync


def set_device_mesh(module: LightningModule, mesh: DeviceMesh | None) -> None:
    """Make the property `device_mesh` of `module` return `mesh`."""
    replace(module, "_device_mesh", mesh)


# Replace the strategy of a Trainer while a run begins


def replace_strategy(trainer: Trainer, strategy: Strategy) -> None:
    """Make `strategy` that of the Trainer, with the Trainer's devices, cluster environment, precision and plugins."""
    connector: Any = trainer._accelerator_connector
    connector.strategy, plugin = strategy, connector.precision_plugin
    is_plain = type(plugin) in (Precision, HalfPrecision, DoublePrecision, MixedPrecision)
    scaler = getattr(plugin, "scaler", None)
    is_default = scaler is None or scaler.state_dict() == torch.amp.GradScaler(plugin.device).state_dict()
    if isinstance(strategy, DeepSpeedStrategy) and is_plain and is_default:  # as Lightning chooses it
        connector.precision_plugin = DeepSpeedPrecision(plugin.precision)
    connector._lazy_init_strategy()


def injects_sampler(trainer: Trainer) -> bool:
    """Return the value of `Trainer(use_distributed_sampler=...)`."""
    return trainer._accelerator_connector.use_distributed_sampler


def training_loaders(trainer: Trainer) -> Any:
    """Return the training loaders as the user's hook returns them, or as they were given to `Trainer.fit`."""
    return trainer.fit_loop._data_source.dataloader()


# Lightning's launcher, which runs the user's script again

LightningSubprocessLauncher = _SubprocessScriptLauncher
"""Lightning's class, which Lightning's strategies use."""


class SubprocessScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a method that a subclass can override to take over the processes."""

    def start_others(self, start: Callable[[], None]) -> None:
        """Start the other local ranks by calling `start`, which adds them to `procs`.

        Lightning then observes the processes in `procs`, and kills all if one fails.
        """
        start()

    def _call_children_scripts(self) -> None:
        self.start_others(super()._call_children_scripts)


# The hooks and gradient clipping that a precision plugin of Lightning runs between an optimizer's closure and step


def after_closure(plugin: Precision, module: LightningModule, optimizer: Any) -> None:
    """Run the `on_before_optimizer_step` hooks, and clip gradients as configured in the Trainer."""
    plugin._after_closure(module, optimizer)


# The placeholder that Lightning uses if there is no optimizer


def is_mock_optimizer(optimizer: object) -> bool:
    """Return whether `optimizer` is Lightning's placeholder for a `configure_optimizers` that returns `None`."""
    return isinstance(optimizer, Optimizer) and not optimizer.param_groups  # torch refuses to create another such one


# The property `device` of LightningModules and other modules of Lightning


def set_device(module: Module, device: torch.device) -> None:
    """Make the property `device` of `module` itself, if it has one, return `device`; nothing is moved."""
    if isinstance(module, _DeviceDtypeModuleMixin):
        if "_device" not in module.__dict__:
            replace(module, "_device", device)  # raises a PrivateNameError
        # `Module.__setattr__` would be too slow: this runs for each replica in each step.
        module.__dict__["_device"] = device


def set_device_everywhere(root: Module, device: torch.device) -> None:
    """Make the property `device` of `root` and its submodules return `device`; nothing is moved."""
    for module in root.modules():
        set_device(module, device)
