"""DeepSpeed's C++ operators, compiled at first use by one rank per host while the others wait."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from lightning_paral.errors import ConfigurationError

_AIO_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"


def check_compiler(option: str, needs_aio: bool) -> None:
    """Raise a `ConfigurationError` if DeepSpeed's operators for `option` could not be compiled here."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigurationError(
            f"{option} compiles a C++ operator at first use, but there is no compiler {compiler!r}. Install one "
            "(Debian: apt-get install g++) or set CXX."
        )
    if not needs_aio:
        return
    command = [compiler, "-x", "c++", "-", "-o", os.devnull, "-laio"]
    if subprocess.run(command, input=_AIO_PROGRAM, text=True, capture_output=True).returncode != 0:
        raise ConfigurationError(
            f"{option} needs libaio with its header, which {compiler!r} does not find. Install it (Debian: apt-get "
            "install libaio-dev; Red Hat: dnf install libaio-devel)."
        )


def load_operator(name: Literal["cpu_adam", "async_io"], option: str) -> None:
    """Load an operator into this process, compiling it first if this host has not yet.

    Ranks take turns: the first compiles, the others find it done. Takes a minute or more then, a moment later on.

    Raises:
        ConfigurationError: it does not compile; what the compiler said follows.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builder = CPUAdamBuilder() if name == "cpu_adam" else AsyncIOBuilder()
    folder = _build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.turn", "w") as turn, _extensions_in(folder):
        fcntl.flock(turn, fcntl.LOCK_EX)
        # torch's own lock is a file, which a process killed while it compiled leaves behind, and which all that come
        # later wait for without end. Nobody builds in this folder without the turn.
        for built in (name, "pin_memory") if name == "async_io" else (name,):  # which DeepSpeed builds on the way
            (folder / built / "lock").unlink(missing_ok=True)
        try:
            builder.load(verbose=False)
        except Exception as error:
            raise ConfigurationError(
                f"{option} needs DeepSpeed's operator {name!r}, which cannot be built here: {error}"
            ) from error


def _build_folder() -> Path:
    """Return a folder of this installation's own: another's sources lie elsewhere, and each would undo the other's."""
    import deepspeed
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    installation = f"{deepspeed.__file__} {deepspeed.__version__} {torch.__file__} {torch.__version__}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return root / f"lightning_paral_{hashlib.sha256(installation.encode()).hexdigest()[:12]}"


@contextmanager
def _extensions_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCH_EXTENSIONS_DIR"]
        else:
            os.environ["TORCH_EXTENSIONS_DIR"] = before
