"""Building a module for FSDP without the values of its parameters, which may need more memory than a rank has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.pretrained import is_pretrained


@contextmanager
def recording(
    module: LightningModule | None, device: torch.device, precision: Precision
) -> Iterator[DeferredConstruction | None]:
    """Record how large tensors are made inside the block instead of making them; they are on the meta device then.

    Args:
        module: gets the tensors; `None` records nothing, as in `trainer.init_module()`.
        device: of this rank.
        precision: of the run.

    Yields:
        DeferredConstruction | None: computes the values later; complete after the block. `None` without a module.
    """
    if module is None:
        yield None
        return
    deferred = DeferredConstruction(device)
    with deferred.recording(module):
        yield deferred
    if isinstance(precision, DoublePrecision | HalfPrecision):  # which converts the module
        deferred.defer_loaded(module)


def has_mapped_weights(module: LightningModule) -> bool:
    """Whether `configure_model` has weights that `from_pretrained` mapped from files: no memory, until written to."""
    return is_overridden("configure_model", module) and any(map(is_pretrained, module.parameters()))
