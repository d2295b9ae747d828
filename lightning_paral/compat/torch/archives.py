"""Where `torch.save` puts things in its files."""

import os
from collections.abc import Callable
from typing import Any

import torch

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch._C.PyTorchFileReader.get_record_offset",
        purpose="to write tensors into a checkpoint, each rank its part",
        reason="torch.load reads records, and does not say where they begin",
        seen="torch 2.11 to 2.13",
    ),
)


def record_offset(path: str | os.PathLike[str]) -> Callable[[str], int]:
    """Return a function that tells at which byte of the file `path` the record of a name begins."""
    reader: Any = torch._C.PyTorchFileReader(str(path))
    offset: Callable[[str], int] = reader.get_record_offset
    return offset
