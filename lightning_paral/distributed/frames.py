"""Where a thread is: in which line of the user's code, and in which call of a library below it."""

import gc
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

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
_WAITS = (
    "torch/distributed/",
    "torch/autograd/graph.py",  # DDP waits for gradients in C++, below the backward pass
    "torch/nn/parallel/distributed.py",
    "deepspeed/comm/",
    "deepspeed/runtime/zero/",
    "lightning_paral/comm/",
    "lightning_paral/distributed/",
    "lightning_paral/engines/zero/runtime/gloo.py",
)
"""Files of libraries in whose functions a rank waits for other ranks."""
_WRAPPERS = ("torch/_ops.py", "deepspeed/utils/nvtx.py")
"""Files whose functions call others that are written in C++, whichever they are."""


class Place(NamedTuple):
    """Where a thread is."""

    text: str
    """Such as `` `training_step` (train.py:41), in `all_reduce` (torch/distributed/distributed_c10d.py:3173) ``."""
    waits: bool
    """Whether it seems to wait for other ranks. A backward pass that computes seems so as well."""


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


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; an empty list if it has ended.

    The caller must not keep them: they keep the local variables of their functions.

    Args:
        thread: the identifier of the thread.
    """
    # Before Python 3.12, creating the object of a frame may collect garbage. A finalizer can then let the other thread
    # run and leave the function, and using the object crashes the process.
    is_paused = sys.version_info < (3, 12) and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        return [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    except KeyError:
        return []
    finally:
        if is_paused:
            gc.enable()


def place_of_thread(thread: int) -> Place:
    """Return where the thread with this identifier is."""
    return place_of((frame, frame.f_lineno) for frame in frames_of(thread))


def place_of(stack: Iterable[tuple[FrameType, int]]) -> Place:
    """Return the innermost line of the user's code in a stack, and the call of a library below it.

    Args:
        stack: the frames and their lines, innermost first.
    """
    inner, waits = "", False
    for frame, line in stack:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        library = library_of(path)
        if not library:
            where = f"{os.path.basename(path)}:{line}"
            own = where if name == "<module>" else f"`{name}` ({where})"
            return Place(f"{own}, in {inner}" if inner else own, waits)
        file = f"{library}/{path.replace(os.sep, '/').rpartition(f'/{library}/')[2]}"
        if not inner and library != "Python" and file not in _WRAPPERS:
            inner, waits = f"`{name}` ({file}:{line})", file.startswith(_WAITS)
    return Place(inner or "no line of Python code", waits)
