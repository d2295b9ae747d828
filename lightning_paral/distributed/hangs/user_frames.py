"""Tell the user's own code in a stack from that of libraries."""

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

LIBRARIES = (
    "lightning_paral",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "torch",
    "torchmetrics",
    "deepspeed",
    "fsspec",
    "jsonargparse",
    "numpy",
    "tqdm",
)
"""Packages whose frames are not the user's. Other packages, such as a library of models, count as user code."""


@cache
def library_of(path: str) -> str:
    """Return the name of the library to which the source file `path` belongs; an empty string for user code."""
    for name in LIBRARIES:
        module = sys.modules.get(name)
        location = getattr(module, "__file__", None) if module is not None else None
        if location and path.startswith(f"{Path(location).parent}{os.sep}"):
            return name
    site = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    is_standard = path.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen"))
    return "Python" if is_standard and not path.startswith(site) else ""
