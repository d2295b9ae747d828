"""Files of `torch.save`: positions of tensors, the machine that reads their pickles, and names of Python 2."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from lightning_paral.compat.private_name import Names

__all__ = [
    "IMPORT_MAPPING",
    "NAME_MAPPING",
    "PythonUnpickler",
]

PythonUnpickler: Any = pickle._Unpickler
"""Python's unpickler, written in Python: its `dispatch` has the opcodes. The one in C has no limits."""

NAMES: Names = {
    "torch._C.PyTorchFileReader": {"get_record_offset": "let each rank write its shards into a checkpoint file"},
    "torch._utils": {
        "IMPORT_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
        "NAME_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
    },
}


# The positions of tensors in files written by `torch.save`


def record_offset(path: str | os.PathLike[str]) -> Callable[[str], int]:
    """Return a function that takes the name of a record in the file `path`, and returns its offset in bytes."""
    reader: Any = torch._C.PyTorchFileReader(str(path))
    offset: Callable[[str], int] = reader.get_record_offset
    return offset
