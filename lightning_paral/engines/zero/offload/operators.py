"""DeepSpeed's C++ operators that offload needs: whether they could be compiled, and loading them."""

import os
import shutil
import subprocess
from typing import Literal

from lightning_paral.engines.zero.offload.compiling import operators_kept
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
    with operators_kept():
        try:
            builder.load(verbose=False)
        except ConfigurationError:
            raise
        except Exception as error:
            needs, instead = ("", "") if name == "cpu_adam" else (" and libaio with its header", ', use Offload("cpu")')
            raise ConfigurationError(
                f"{option} needs DeepSpeed's operator {name!r}, which cannot be built here. It takes a C++ compiler "
                f"(CXX, or g++), Python's headers (Debian: apt-get install python3-dev), ninja (pip install ninja)"
                f"{needs}; no CUDA toolkit. Mend what is said below{instead}, or leave out {option}.\n{error}"
            ) from error
