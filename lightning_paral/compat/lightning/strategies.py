"""Attributes that Lightning's strategies keep to themselves, and that strategies derived from them read or set."""

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
    purpose="to run steps through an engine that calls itself",
    reason="the strategy makes the object itself and takes no other",
    seen=_SEEN,
)
_MESH_OF_STRATEGY = PrivateName(
    name="lightning.pytorch.strategies.ModelParallelStrategy._device_mesh",
    on_instances=True,
    purpose="to give the strategy a mesh of our own",
    reason="the public property device_mesh has no setter, and Lightning's mesh knows no replicas",
    seen=_SEEN,
)
_MESH_OF_MODULE = PrivateName(
    name="lightning.pytorch.LightningModule._device_mesh",
    on_instances=True,
    purpose="to let self.device_mesh be the mesh that the strategy made",
    reason="the public property device_mesh has no setter",
    seen=_SEEN,
)
_DDP_OPTIONS = PrivateName(
    name="lightning.pytorch.strategies.DDPStrategy._ddp_kwargs",
    on_instances=True,
    purpose="to make DDP's reducer anew with other options",
    reason="options can be given to the constructor only",
    seen=_SEEN,
)
_STATIC_GRAPH_DONE = PrivateName(
    name="lightning.pytorch.strategies.DDPStrategy._pl_static_graph_delay_done",
    on_instances=True,
    purpose="to let Lightning delay the first all-reduce of a static graph for a second reducer, too",
    reason="Lightning makes one reducer per fit and never forgets",
    seen=_SEEN,
)
NAMES = (
    PrivateName(
        name="lightning.pytorch.strategies.ParallelStrategy._layer_sync",
        on_instances=True,
        purpose="to know whether Trainer(sync_batchnorm=True) was said",
        reason="the Trainer tells nobody but the strategy, in this attribute",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.strategies.DDPStrategy._model_averager",
        on_instances=True,
        purpose="to know whether post-local SGD lets weights differ between ranks",
        reason="no public attribute tells",
        seen=_SEEN,
    ),
    _REDIRECTION,
    _MESH_OF_STRATEGY,
    _MESH_OF_MODULE,
    _DDP_OPTIONS,
    _STATIC_GRAPH_DONE,
)


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """Return what synchronizes BatchNorm layers, `None` unless `Trainer(sync_batchnorm=True)`."""
    return strategy._layer_sync


def averages_models(strategy: Strategy) -> bool:
    """Whether ranks average their weights now and then, and hold different ones in between: post-local SGD."""
    return isinstance(strategy, DDPStrategy) and strategy._model_averager is not None


def set_forward_redirection(strategy: Strategy, redirection: Any) -> None:
    """Let `strategy` run steps through `redirection`, a `ForwardRedirection`."""
    _REDIRECTION.replace_on(strategy, redirection)


def set_device_mesh(strategy: ModelParallelStrategy, module: LightningModule | None, mesh: DeviceMesh | None) -> None:
    """Let `device_mesh` of the strategy, and of the module if there is one, return `mesh`."""
    _MESH_OF_STRATEGY.replace_on(strategy, mesh)
    if module is not None:
        _MESH_OF_MODULE.replace_on(module, mesh)


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the options with which `strategy` makes a `DistributedDataParallel`."""
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def set_ddp_options(strategy: DDPStrategy, options: dict[str, Any]) -> None:
    """Let `strategy` make its next `DistributedDataParallel` with `options`."""
    _DDP_OPTIONS.replace_on(strategy, options)


def forget_static_graph(strategy: DDPStrategy) -> None:
    """Let `strategy` delay the first all-reduce of a static graph again: there is a new reducer."""
    _STATIC_GRAPH_DONE.replace_on(strategy, False)
