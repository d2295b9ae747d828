"""Private attributes of Lightning's strategies that our strategies read or set."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh

from lightning_paral.compat.private_name import Names, replace

NAMES: Names = {
    "lightning.pytorch.strategies.Strategy": {
        "._lightning_module": "give a module that is planned a Trainer with a strategy that knows it",
        "._forward_redirection": "run steps through DeepSpeed's engine",
    },
    "lightning.pytorch.strategies.ParallelStrategy": {
        "._layer_sync": "know whether Trainer(sync_batchnorm=True) was set",
    },
    "lightning.pytorch.strategies.DDPStrategy": {
        "._model_averager": "know whether weights differ between ranks under post-local SGD",
        "._ddp_kwargs": "create DDP's reducer again with other options",
        "._pl_static_graph_delay_done": "delay the first all-reduce of a static graph again",
    },
    "lightning.pytorch.strategies.ModelParallelStrategy": {"._device_mesh": "give the strategy our own mesh"},
    "lightning.pytorch.LightningModule": {"._device_mesh": "make self.device_mesh return the strategy's mesh"},
}


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """Return the plugin that synchronizes BatchNorm layers, or `None` without `Trainer(sync_batchnorm=True)`."""
    return strategy._layer_sync


def averages_models(strategy: Strategy) -> bool:
    """Return whether the ranks use post-local SGD: they average weights periodically, and differ in between."""
    return isinstance(strategy, DDPStrategy) and strategy._model_averager is not None


def set_forward_redirection(strategy: Strategy, redirection: Any) -> None:
    """Make `strategy` run steps through `redirection`, a `ForwardRedirection`."""
    replace(strategy, "_forward_redirection", redirection)


def set_device_mesh(strategy: ModelParallelStrategy, module: LightningModule | None, mesh: DeviceMesh | None) -> None:
    """Set the mesh of the strategy, and of the module if there is one, to `mesh`."""
    replace(strategy, "_device_mesh", mesh)
    if module is not None:
        replace(module, "_device_mesh", mesh)


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the options that `strategy` passes to `DistributedDataParallel`."""
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def set_ddp_options(strategy: DDPStrategy, options: dict[str, Any]) -> None:
    """Set the options that `strategy` passes to its next `DistributedDataParallel`."""
    replace(strategy, "_ddp_kwargs", options)


def forget_static_graph(strategy: DDPStrategy) -> None:
    """Make `strategy` delay the first all-reduce of a static graph again, for a new reducer."""
    replace(strategy, "_pl_static_graph_delay_done", False)


def set_module(strategy: Strategy, module: LightningModule) -> None:
    """Make `strategy.lightning_module` return `module`."""
    replace(strategy, "_lightning_module", module)
