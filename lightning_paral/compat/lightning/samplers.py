"""How Lightning prepares loaders for several ranks."""

from collections.abc import Callable
from contextlib import ExitStack

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.trainer.states import RunningStage

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import PrivateName

__all__ = ["IndexBatchSampler", "injects_sampler", "replace_preparation"]

_SEEN = "lightning 2.6.1 to 2.6.6"
_PREPARE = PrivateName(
    name="lightning.pytorch.trainer.connectors.data_connector._DataConnector._prepare_dataloader",
    parameters=("self", "dataloader", "shuffle", "mode"),
    purpose="to distribute samples over ranks in place of a DistributedSampler",
    reason="Strategy.process_dataloader runs after Lightning has injected its sampler",
    seen=_SEEN,
)
NAMES = (
    _PREPARE,
    PrivateName(
        name="lightning.pytorch.Trainer._data_connector",
        on_instances=True,
        purpose="to distribute samples over ranks in place of a DistributedSampler",
        reason="Strategy.process_dataloader runs after Lightning has injected its sampler",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.Trainer._accelerator_connector",
        on_instances=True,
        purpose="to know the value of Trainer(use_distributed_sampler=...)",
        reason="the Trainer has no public attribute for it",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector.use_distributed_sampler",
        on_instances=True,
        purpose="to know the value of Trainer(use_distributed_sampler=...)",
        reason="the Trainer has no public attribute for it",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper",
        parameters=("batch_sampler",),
        purpose="to tell callbacks that write predictions the indices of each batch",
        reason="the prediction loop reads indices only from a batch sampler of this class",
        seen=_SEEN,
    ),
)

Preparation = Callable[[object, bool, RunningStage], object]
"""Takes a loader, whether it shuffles, and the running stage; returns the loader to use."""


def replace_preparation(trainer: Trainer, prepare: Preparation, undo: ExitStack) -> Preparation:
    """Replace Lightning's preparation of loaders with `prepare` until `undo` is closed; return Lightning's method."""
    _PREPARE.resolve()
    connector = trainer._data_connector
    plain: Preparation = connector._prepare_dataloader
    shadow_method(connector, "_prepare_dataloader", prepare, undo)
    return plain


def injects_sampler(trainer: Trainer) -> bool:
    """Return the value of `Trainer(use_distributed_sampler=...)`."""
    return trainer._accelerator_connector.use_distributed_sampler
