"""The collection behind `self.log`, and the metrics that hold its values."""

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync

from lightning_paral.compat.private_name import PrivateName

__all__ = ["Metadata", "ResultCollection", "ResultMetric", "Sync", "check_overridden", "make_sync"]

_SEEN = "lightning 2.6.1 to 2.6.6"
_MODULE = "lightning.pytorch.trainer.connectors.logger_connector.result"
_REASON = "Lightning has no public way to combine the values that several ranks have logged"
_OVERRIDDEN = (
    PrivateName(
        name=f"{_MODULE}._ResultCollection.log",
        parameters=("self", "fx", "name", "value", "sync_dist_fn", "add_dataloader_idx"),
        purpose="to reduce each value together with a checksum of its key",
        reason=_REASON,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._ResultCollection.update_metrics",
        parameters=("self", "key", "value", "batch_size"),
        purpose="to reduce values separately if not all ranks take part in a step",
        reason=_REASON,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._ResultCollection.metrics",
        parameters=("self", "on_step"),
        purpose="to report keys that only some ranks have logged",
        reason=_REASON,
        seen=_SEEN,
    ),
)
NAMES = (
    *_OVERRIDDEN,
    PrivateName(
        name=f"{_MODULE}._ResultCollection.valid_items",
        parameters=("self",),
        purpose="to exchange the values that ranks have logged in an epoch",
        reason=_REASON,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._ResultCollection.dataloader_idx",
        on_instances=True,
        purpose="to know to which loader results belong",
        reason=_REASON,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._ResultCollection.batch",
        on_instances=True,
        purpose="to know when a training batch begins and ends",
        reason="no hook of a strategy runs at the end of a training batch",
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._ResultMetric",
        parameters=("metadata", "is_tensor"),
        purpose="to create the value of a key that this rank has not logged, because it had no batch",
        reason=_REASON,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._Metadata",
        parameters=(
            *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph"),
            *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
        ),
        purpose="to create the options of a key that this rank has not logged, because it had no batch",
        reason=_REASON,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_MODULE}._Sync",
        parameters=("fn", "_should"),
        purpose="to define how a logged value is reduced",
        reason=_REASON,
        seen=_SEEN,
    ),
)


def check_overridden() -> None:
    """Raise a `PrivateNameError` if Lightning lacks a method that subclasses of `ResultCollection` override."""
    for entry in _OVERRIDDEN:
        entry.resolve()


def make_sync(reduce: Any, *, should: bool) -> Sync:
    """Return a `Sync` that reduces a value with `reduce` if `should` is true."""
    return Sync(fn=reduce, _should=should)
