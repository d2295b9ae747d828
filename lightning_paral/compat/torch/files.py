"""The machine that reads the pickles of `torch.save`, and the names of Python 2 in them."""

import pickle
from typing import Any

from lightning_paral.compat.private_name import Names

PythonUnpickler: Any = pickle._Unpickler
"""Python's unpickler, written in Python: its `dispatch` has the opcodes. The one in C has no limits."""

NAMES: Names = {
    "pickle": {"_Unpickler": "read pickles with few opcodes, and limits for time and memory"},
}

# Protocol 2, which `torch.save` writes, has the names of Python 2 of what torch.load accepts.
IMPORT_MAPPING = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins"}
"""Modules by their names in Python 2."""
NAME_MAPPING = {("__builtin__", "xrange"): ("builtins", "range")}
"""Module and name by those in Python 2."""
