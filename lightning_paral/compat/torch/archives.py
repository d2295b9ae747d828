"""The positions of tensors in files written by `torch.save`."""

import os
from collections.abc import Callable
from typing import Any

import torch

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch._C.PyTorchFileReader": {"get_record_offset": "let each rank write its shards into a checkpoint file"},
}


def record_offset(path: str | os.PathLike[str]) -> Callable[[str], int]:
    """Return a function that takes the name of a record in the file `path`, and returns its offset in bytes."""
    reader: Any = torch._C.PyTorchFileReader(str(path))
    offset: Callable[[str], int] = reader.get_record_offset
    return offset
