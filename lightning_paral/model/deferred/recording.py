"""Construct a module without allocating its parameters, which may need more memory than a rank has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.hugging_face import is_pretrained


@contextmanager
def recording(
    module: LightningModule | None, device: torch.device, precision: Precision
) -> Iterator[DeferredConstruction | None]:
    """Create large tensors on the meta device inside the block, and record how to compute their values later.

    Args:
        module: the module that gets the tensors. `None`, as in `trainer.init_module()`, defers nothing.
        device: the device of this rank.
        precision: the precision plugin of the run.

    Yields:
        DeferredConstruction | None: computes the values, once the block has ended. `None` if `module` is `None`.
    """
    if module is None:
        yield None
        return
    deferred = DeferredConstruction(device)
    with deferred.recording(module):
        yield deferred
    if isinstance(precision, DoublePrecision | HalfPrecision):  # these convert the module to another dtype
        deferred.defer_loaded(module)


def has_mapped_weights(module: LightningModule) -> bool:
    """Return whether `configure_model` creates weights that `from_pretrained` memory-maps from files."""
    return is_overridden("configure_model", module) and any(map(is_pretrained, module.parameters()))
