"""DeepSpeed's C++ operators for offload: check for a compiler, compile once, side by side, and load."""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.compat.deepspeed.runtime import load_compiled
from lightning_paral.engines.zero.runtime import compile_operator
from lightning_paral.errors import ConfigurationError

_AIO_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"

_MAX_SECONDS = 1800.0
"""How long operators may compile. They take minutes, several times as long on a busy machine."""


def check_compiler(option: str, needs_aio: bool) -> None:
    """Raise a `ConfigurationError` if this node cannot compile DeepSpeed's operators.

    Args:
        option: the name of the option that needs an operator, for messages.
        needs_aio: whether the operator needs libaio.
    """
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
            f"{option} needs libaio and its header, which {compiler!r} does not find. Install them (Debian: apt-get "
            "install libaio-dev; Red Hat: dnf install libaio-devel)."
        )


def load_operators(needed: Mapping[str, str]) -> None:
    """Load operators into this process. Missing ones are compiled first, side by side, which takes minutes.

    If several ranks of a node need an operator, one compiles it and the others wait.

    Args:
        needed: the name of the option that needs an operator, for messages, by the name of the operator: `"cpu_adam"`
            or `"async_io"`.

    Raises:
        ConfigurationError: an operator does not compile, or not in time, or cannot be loaded. If it does not compile,
            the message ends with what the compiler says.
    """
    from deepspeed.git_version_info import installed_ops

    if "async_io" in needed:  # which has the symbols of `pin_memory`, so that is loaded first
        needed = {"pin_memory": needed["async_io"], **needed}
    names = [name for name in needed if not installed_ops.get(name)]
    folder = operator_folder()
    missing = [name for name in names if not (folder / f"{name}.so").is_file()]
    if missing:
        _compile(missing, folder, needed)
    for name in names:
        file = folder / f"{name}.so"
        try:
            load_compiled(name, file)
        except ImportError as error:
            raise ConfigurationError(
                f"DeepSpeed's operator {name!r}, which {needed[name]} needs, was compiled, but cannot be loaded: "
                f"{error}. Delete {file} to compile it again, or leave out {needed[name]}."
            ) from error


def operator_folder() -> Path:
    """Return the folder of compiled operators.

    It is below TORCH_EXTENSIONS_DIR if that is set, else in the user's cache, which virtual environments share. Its
    name contains the versions, and a hash of the version of Python and the instruction set of the processor.
    """
    import deepspeed

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(given) / "lightning_paral" if given else cache / "lightning_paral" / "ops"
    depends_on = (sysconfig.get_config_var("SOABI"), platform.machine(), _processor())
    digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:12]
    return root / f"torch-{torch.__version__}-deepspeed-{deepspeed.__version__}-{digest}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(names: Sequence[str], folder: Path, needed: Mapping[str, str]) -> None:
    rank_zero_info(
        f"Compiling DeepSpeed's operators {', '.join(names)}, which takes a few minutes. This happens once for these "
        f"versions of torch and DeepSpeed and this type of processor; the result is kept in {folder}."
    )
    start = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        compilers = {name: _start(name, folder) for name in names}
    except OSError as error:
        raise ConfigurationError(
            f"DeepSpeed's operators must be compiled and kept in {folder}, which cannot be written: {error}. Set "
            "TORCH_EXTENSIONS_DIR to a folder that this process can write to."
        ) from error
    try:
        for name, compiler in compilers.items():
            try:
                said, _ = compiler.communicate(timeout=max(0.0, start + _MAX_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ConfigurationError(
                    f"DeepSpeed's operator {name!r}, which {needed[name]} needs, was not compiled within "
                    f"{_MAX_SECONDS / 60:.0f} minutes. Start again when the machine is less busy."
                ) from None
            if compiler.returncode != 0:
                raise ConfigurationError(_explain(name, needed[name], said))
    finally:
        _end(compilers.values())
    rank_zero_info(f"Compiled {', '.join(names)} in {time.monotonic() - start:.0f} s.")


def _end(compilers: Iterable["subprocess.Popen[str]"]) -> None:
    """End processes that still compile: ninja ends its compilers if it is terminated, but not if it is killed."""
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, None)):
        running = [compiler for compiler in compilers if compiler.poll() is None]
        for compiler in running:
            with suppress(ProcessLookupError):
                os.killpg(compiler.pid, number)
        for compiler in running:
            with suppress(subprocess.TimeoutExpired):
                compiler.communicate(timeout=seconds)


def _start(name: str, folder: Path) -> "subprocess.Popen[str]":
    """Start to compile the operator `name` in a session of its own, as for a machine without accelerators.

    DeepSpeed's operators for offload use no CUDA, but on a machine with GPUs it would require the CUDA toolkit.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)))  # ninja may be there
    return subprocess.Popen(
        [sys.executable, compile_operator.__file__, name, str(folder), str(os.getpid())],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _explain(name: str, option: str, said: str) -> str:
    needs, instead = ("", "") if name == "cpu_adam" else (", libaio and its header", ', use Offload("cpu")')
    return (
        f"{option} needs DeepSpeed's operator {name!r}, which cannot be compiled on this node. It needs a C++ compiler "
        "(CXX, or g++), Python's headers (Debian: apt-get install python3-dev), ninja (pip install ninja)"
        f"{needs}, but no CUDA toolkit. Fix the error below{instead}, or leave out {option}.\n{said[-8000:]}"
    )
