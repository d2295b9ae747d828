"""Private attributes of Lightning's strategies that our strategies read or set."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_REDIRECTION = PrivateName(
    name="lightning.pytorch.strategies.Strategy._forward_redirection",
    on_instances=True,
    purpose="to run steps through DeepSpeed's engine",
    reason="the strategy creates the object itself, and has no option to replace it",
    seen=_SEEN,
)
_STRATEGY_MESH = PrivateName(
    name="lightning.pytorch.strategies.ModelParallelStrategy._device_mesh",
    on_instances=True,
    purpose="to give the strategy our own mesh",
    reason="the public property device_mesh has no setter, and Lightning's mesh has no replicate dimension",
    seen=_SEEN,
)
_MODULE_MESH = PrivateName(
    name="lightning.pytorch.LightningModule._device_mesh",
    on_instances=True,
    purpose="to make self.device_mesh return the strategy's mesh",
    reason="the public property device_mesh has no setter",
    seen=_SEEN,
)
_DDP_OPTIONS = PrivateName(
    name="lightning.pytorch.strategies.DDPStrategy._ddp_kwargs",
    on_instances=True,
    purpose="to create DDP's reducer again with other options",
    reason="only the constructor takes these options",
    seen=_SEEN,
)
_STATIC_GRAPH_DONE = PrivateName(
    name="lightning.pytorch.strategies.DDPStrategy._pl_static_graph_delay_done",
    on_instances=True,
    purpose="to make Lightning delay the first all-reduce of a static graph for a second reducer as well",
    reason="Lightning expects one reducer per strategy and never resets it",
    seen=_SEEN,
)
_MODULE = PrivateName(
    name="lightning.pytorch.strategies.Strategy._lightning_module",
    on_instances=True,
    purpose="to give a module that is planned a Trainer with a strategy that knows it",
    reason="connect also asks the module for its strategy, and the public property has no setter",
    seen=_SEEN,
)
NAMES = (
    _MODULE,
    PrivateName(
        name="lightning.pytorch.strategies.ParallelStrategy._layer_sync",
        on_instances=True,
        purpose="to know whether Trainer(sync_batchnorm=True) was set",
        reason="the Trainer stores it only in this attribute of the strategy",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.strategies.DDPStrategy._model_averager",
        on_instances=True,
        purpose="to know whether weights differ between ranks under post-local SGD",
        reason="no public attribute says so",
        seen=_SEEN,
    ),
    _REDIRECTION,
    _STRATEGY_MESH,
    _MODULE_MESH,
    _DDP_OPTIONS,
    _STATIC_GRAPH_DONE,
)


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """Return the plugin that synchronizes BatchNorm layers, or `None` without `Trainer(sync_batchnorm=True)`."""
    return strategy._layer_sync


def averages_models(strategy: Strategy) -> bool:
    """Return whether the ranks use post-local SGD: they average weights periodically, and differ in between."""
    return isinstance(strategy, DDPStrategy) and strategy._model_averager is not None


def set_forward_redirection(strategy: Strategy, redirection: Any) -> None:
    """Make `strategy` run steps through `redirection`, a `ForwardRedirection`."""
    _REDIRECTION.replace_on(strategy, redirection)


def set_device_mesh(strategy: ModelParallelStrategy, module: LightningModule | None, mesh: DeviceMesh | None) -> None:
    """Set the mesh of the strategy, and of the module if there is one, to `mesh`."""
    _STRATEGY_MESH.replace_on(strategy, mesh)
    if module is not None:
        _MODULE_MESH.replace_on(module, mesh)


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the options that `strategy` passes to `DistributedDataParallel`."""
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def set_ddp_options(strategy: DDPStrategy, options: dict[str, Any]) -> None:
    """Set the options that `strategy` passes to its next `DistributedDataParallel`."""
    _DDP_OPTIONS.replace_on(strategy, options)


def forget_static_graph(strategy: DDPStrategy) -> None:
    """Make `strategy` delay the first all-reduce of a static graph again, for a new reducer."""
    _STATIC_GRAPH_DONE.replace_on(strategy, False)


def set_module(strategy: Strategy, module: LightningModule) -> None:
    """Make `strategy.lightning_module` return `module`."""
    _MODULE.replace_on(strategy, module)
