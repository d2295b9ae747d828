"""The collection behind `self.log`, and the metrics that hold its values."""

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync

from lightning_paral.compat.private_name import Names, named

__all__ = ["Metadata", "ResultCollection", "ResultMetric", "Sync", "check_overridden", "make_sync"]

NAMES: Names = {
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection": {
        "log(fx, name, value, sync_dist_fn, add_dataloader_idx)": "reduce a value with a checksum of its key",
        "update_metrics(key, value, batch_size)": "reduce values separately in uneven steps",
        "metrics(on_step)": "report keys that only some ranks have logged",
        "valid_items": "exchange the values that ranks have logged in an epoch",
        ".dataloader_idx": "know to which loader results belong",
        ".batch": "know when a training batch begins and ends",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result": {
        "_ResultMetric(metadata, is_tensor)": "create the value of a key that this rank has not logged",
        "_Metadata(fx, name, reduce_fx, dataloader_idx, metric_attribute)": "create a key that others have logged",
        "_Sync(fn, _should)": "define how a logged value is reduced",
    },
}


def check_overridden() -> None:
    """Raise a `PrivateNameError` if Lightning lacks a method that subclasses of `ResultCollection` override."""
    for name in ("log", "update_metrics", "metrics"):
        named(NAMES, f"_ResultCollection.{name}").resolve()


def make_sync(reduce: Any, *, should: bool) -> Sync:
    """Return a `Sync` that reduces a value with `reduce` if `should` is true."""
    return Sync(fn=reduce, _should=should)
