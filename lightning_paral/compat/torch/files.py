"""The machine that reads the pickles of `torch.save`."""

import pickle
from typing import Any

from lightning_paral.compat.private_name import Names

PythonUnpickler: Any = pickle._Unpickler
"""Python's unpickler, written in Python: its `dispatch` has the opcodes. The one in C has no limits."""

NAMES: Names = {
    "pickle": {"_Unpickler": "read pickles with few opcodes, and limits for time and memory"},
}
