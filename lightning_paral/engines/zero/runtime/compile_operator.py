"""Compile an operator of DeepSpeed for offload: `compile_operator.py NAME FOLDER PARENT_PID`.

This file is executed by its path in a process of its own, and imports nothing from this package, which would take
seconds. It ends, with its compilers, when the process PARENT_PID ends.
"""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

_BUILDERS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}


def compile_operator(name: str, folder: Path) -> None:
    """Compile the operator `name` to a file in `folder`, unless another process does so first.

    Each build has its own folder: a killed build leaves torch's lock file in it, and any later build in that folder
    would wait for the lock forever.
    """
    with open(folder / f"{name}.turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # the system releases it if this process ends
        if (folder / f"{name}.so").is_file():
            return
        for left in folder.glob(f"{name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        building = tempfile.mkdtemp(prefix=f"{name}-", dir=folder)
        os.environ["TORCH_EXTENSIONS_DIR"] = building
        from deepspeed.ops import op_builder

        compiled = Path(building, name, f"{name}.so")
        try:
            getattr(op_builder, _BUILDERS[name])().jit_load(verbose=False)
        except ImportError:
            # `async_io` can be imported only after `pin_memory`, which is compiled at the same time.
            if name != "async_io" or not compiled.is_file():
                raise
        os.replace(compiled, folder / compiled.name)
        shutil.rmtree(building, ignore_errors=True)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    # ninja has each compiler in a group of its own, and ends them if it is terminated, but not if it is killed.
    os.killpg(os.getpgid(0), signal.SIGTERM)
    time.sleep(2.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # has a `deepspeed.py`; absent with PYTHONSAFEPATH
        del sys.path[0]
    signal.signal(signal.SIGTERM, lambda *_: None)  # this process ends after ninja, which gets the signal too
    Thread(target=_end_after, args=(int(sys.argv[3]),), daemon=True).start()
    compile_operator(sys.argv[1], Path(sys.argv[2]))
