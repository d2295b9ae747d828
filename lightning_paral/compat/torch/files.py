"""The machine that reads the pickles of `torch.save`, and the names of Python 2 in them."""

import pickle
from typing import Any

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
    "pickle": {"_Unpickler": "read pickles with few opcodes, and limits for time and memory"},
    "torch._utils": {
        "IMPORT_MAPPING; NAME_MAPPING": "accept exactly the names in a checkpoint that torch.load accepts",
    },
}
