"""The batch with which a step is followed: from the user's data, or from shapes."""

import re
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_paral.errors import ConfigurationError

_TENSOR = re.compile(r"\s*(?P<sizes>\d+(x\d+)*)\s*(:\s*(?P<dtype>\w+))?\s*")


def first_batch(module: LightningModule, datamodule: LightningDataModule | None) -> Any:
    """Return the first training batch. It prepares and sets up the data, and creates the training loader.

    Args:
        module: has the training loader if there is no data module.
        datamodule: the data.

    Raises:
        ConfigurationError: there is no training data, or it is empty.
    """
    source = datamodule if datamodule is not None else module
    if not is_overridden("train_dataloader", source):
        raise ConfigurationError(
            f"{type(source).__name__} has no training data. Give the data, or the shape of a batch, for example "
            "--batch-shape 8x128:int64,8x128:int64."
        )
    source.prepare_data()
    if datamodule is not None:
        datamodule.setup("fit")
    return batch_of_loaders(source.train_dataloader())


def batch_of_loaders(loaders: Any) -> Any:
    """Return the first batch of a loader; for a list or dict of loaders, one of each.

    Raises:
        ConfigurationError: a loader has no batch.
    """
    if isinstance(loaders, dict):
        return {key: batch_of_loaders(loader) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [batch_of_loaders(loader) for loader in loaders]
    try:
        return next(iter(loaders))
    except StopIteration:
        raise ConfigurationError("The training loader has no batch, so no step can be planned.") from None


def batch_of_shape(text: str) -> Any:
    """Return a batch of zeros; a tuple if there are several tensors.

    Args:
        text: shapes and dtypes, such as `8x128:int64,8x128:int64` or `16x3x224x224,16:int64`. Without a dtype: float32.

    Raises:
        ConfigurationError: the text is not of this form.
    """
    tensors = []
    for part in text.split(","):
        found = _TENSOR.fullmatch(part)
        dtype = getattr(torch, found["dtype"] or "float32", None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--batch-shape {text!r}: {part.strip()!r} is not a shape. Write sizes and a dtype, as in "
                "8x128:int64,8x128:int64; without a dtype, it is float32."
            )
        shape = tuple(int(size) for size in found["sizes"].split("x"))
        tensors.append(torch.zeros((), dtype=dtype).expand(shape))  # takes no memory
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch; `None` if its tensors differ in their first dimension."""
    sizes: set[int] = set()
    apply_to_collection(batch, Tensor, lambda tensor: sizes.add(tensor.shape[0] if tensor.dim() else 1))
    if len(sizes) != 1:
        try:
            return int(extract_batch_size(batch))
        except Exception:
            return None
    return sizes.pop()


def resized(batch: Any, size: int, batch_size: int) -> Any:
    """Return a batch with another number of samples and no memory of its own.

    Args:
        batch: a batch of `batch_size` samples, in the first dimension of its tensors.
        size: the number of samples to return.
        batch_size: the number of samples of `batch`.
    """

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != batch_size:
            return tensor
        return torch.zeros((), dtype=tensor.dtype).expand(size, *tensor.shape[1:])

    return apply_to_collection(batch, Tensor, resize)
