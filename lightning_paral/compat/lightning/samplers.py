"""How Lightning prepares loaders for several ranks."""

from collections.abc import Callable
from contextlib import ExitStack

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.trainer.states import RunningStage

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names, named

__all__ = ["IndexBatchSampler", "injects_sampler", "replace_preparation"]

NAMES: Names = {
    "lightning.pytorch.trainer.connectors.data_connector._DataConnector": {
        "_prepare_dataloader(dataloader, shuffle, mode)": "distribute samples ourselves",
    },
    "lightning.pytorch.Trainer": {
        "._data_connector": "distribute samples ourselves instead of with DistributedSampler",
        "._accelerator_connector": "know the value of Trainer(use_distributed_sampler=...)",
    },
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector": {
        ".use_distributed_sampler": "know the value of Trainer(use_distributed_sampler=...)",
    },
    "lightning.pytorch.overrides.distributed": {
        "_IndexBatchSamplerWrapper(batch_sampler)": "pass indices to callbacks that write predictions",
    },
}

Preparation = Callable[[object, bool, RunningStage], object]
"""Takes a loader, whether to shuffle it, and the running stage; returns the loader to use."""


def replace_preparation(trainer: Trainer, prepare: Preparation, undo: ExitStack) -> Preparation:
    """Replace Lightning's preparation of loaders with `prepare` until `undo` is closed; return Lightning's method."""
    named(NAMES, "_prepare_dataloader").resolve()
    connector = trainer._data_connector
    plain: Preparation = connector._prepare_dataloader
    shadow_method(connector, "_prepare_dataloader", prepare, undo)
    return plain


def injects_sampler(trainer: Trainer) -> bool:
    """Return the value of `Trainer(use_distributed_sampler=...)`."""
    return trainer._accelerator_connector.use_distributed_sampler
