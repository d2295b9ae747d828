"""DeepSpeed's C++ operators: check for a compiler, compile once per version and processor, cache and load."""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.compat.deepspeed.runtime import is_for_cuda, load_operators_by
from lightning_paral.engines.zero.runtime import ninja
from lightning_paral.engines.zero.runtime.deepspeed import restore_variables
from lightning_paral.errors import ConfigurationError

_AIO_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"


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


def load_operator(name: Literal["cpu_adam", "async_io"], option: str) -> None:
    """Load an operator into this process. If it is not cached, compile it first, which takes minutes.

    If several ranks need it, one compiles and the others wait.

    Args:
        name: DeepSpeed's name of the operator.
        option: the name of the option that needs it, for messages.

    Raises:
        ConfigurationError: the operator does not compile. The message ends with the output of the compiler.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builder = CPUAdamBuilder() if name == "cpu_adam" else AsyncIOBuilder()
    with keep_operators():
        try:
            builder.load(verbose=False)
        except ConfigurationError:
            raise
        except Exception as error:
            needs, instead = ("", "") if name == "cpu_adam" else (", libaio and its header", ', use Offload("cpu")')
            raise ConfigurationError(
                f"{option} needs DeepSpeed's operator {name!r}, which cannot be compiled on this node. It needs a "
                f"C++ compiler (CXX, or g++), Python's headers (Debian: apt-get install python3-dev), ninja (pip "
                f"install ninja){needs}, but no CUDA toolkit. Fix the error below{instead}, or leave out {option}."
                f"\n{error}"
            ) from error


_VARIABLES = ("CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")
"""Environment variables that change how operators are compiled."""


def keep_operators() -> AbstractContextManager[None]:
    """Return a context in which DeepSpeed loads its operators from `operator_folder`, and compiles missing ones."""
    return load_operators_by(_load)


def _load(builder: Any, compile_and_load: Callable[[], Any]) -> Any:
    folder = operator_folder(builder)
    cached = folder / f"{builder.name}.so"
    if cached.is_file():
        return _import_extension(builder.name, cached)
    toolkit = _toolkit_for(builder)
    rank_zero_info(
        f"Compiling DeepSpeed's operator {builder.name!r}, which takes a few minutes. This happens once for these "
        f"versions of torch and DeepSpeed and this type of processor; the result is cached in {folder}."
    )
    start = time.monotonic()
    with _compile_lock(folder, builder.name):
        if cached.is_file():
            return _import_extension(builder.name, cached)  # another rank has compiled it
        # Each build has its own folder: a killed build leaves torch's lock file in it, and any later build in that
        # folder would wait for the lock forever.
        for left in folder.glob(f"{builder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=f"{builder.name}-", dir=folder))
        with _build_environment(building, toolkit):
            module = compile_and_load()
        os.replace(module.__file__, cached)
        module.__file__ = str(cached)
        shutil.rmtree(building, ignore_errors=True)
    rank_zero_info(f"Compiled {builder.name!r} in {time.monotonic() - start:.0f} s.")
    return module


def operator_folder(builder: Any) -> Path:
    """Return the folder that caches the operator of `builder`.

    It is below TORCH_EXTENSIONS_DIR if that is set, else in the user's cache, which virtual environments share. Its
    name contains a hash of everything that the machine code depends on.
    """
    import deepspeed

    on_cuda = torch.cuda.is_available()
    depends_on = [
        *(deepspeed.__version__, torch.__version__, torch.version.cuda, sysconfig.get_config_var("SOABI")),
        *(platform.machine(), _processor()),
        *(os.environ.get(name) for name in _VARIABLES),
        *(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count() if on_cuda else 0)),
    ]
    if is_for_cuda(builder):  # an operator for the CPU can have the same name
        depends_on += ["cuda", _cuda_home(), os.environ.get("CC")]
    digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:12]
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(given) / "lightning_paral" if given else cache / "lightning_paral" / "ops"
    return root / f"torch-{torch.__version__}-deepspeed-{deepspeed.__version__}-{digest}"


def _toolkit_for(builder: Any) -> Path | None:
    """Return the folder of the CUDA toolkit if `builder` needs it, else `None`.

    Raises:
        ConfigurationError: no CUDA toolkit was found.
    """
    if not is_for_cuda(builder) or not torch.cuda.is_available():
        return None
    home = _cuda_home()
    if home is None:
        raise ConfigurationError(
            f"DeepSpeed's operator {builder.name!r} is compiled with the CUDA toolkit, which was not found: CUDA_HOME "
            f"is not set, and nvcc is not on PATH. Install the toolkit of CUDA {torch.version.cuda}, or use an "
            "optimizer that needs no operator, such as torch.optim.AdamW(fused=True)."
        )
    return Path(home)


def _cuda_home() -> str | None:
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME


def _processor() -> str:
    # Operators are compiled for the instruction set of the processor.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextmanager
def _compile_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock for compiling the operator `name` into `folder`. The system releases it if the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / f"{name}.turn", "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigurationError(
            f"DeepSpeed's operator {name!r} must be compiled and cached in {folder}, which cannot be written: {error}. "
            "Set TORCH_EXTENSIONS_DIR to a folder that this process can write to."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _build_environment(building: Path, toolkit: Path | None) -> Iterator[None]:
    """Make torch build in the folder `building`, with a ninja that is terminated when this process ends.

    LIBRARY_PATH includes the stubs of the CUDA `toolkit`, because some drivers are installed without the `libcuda.so`
    that linkers look for.
    """
    changed = {"TORCH_EXTENSIONS_DIR": str(building)}
    if toolkit is not None:
        paths = (os.environ.get("LIBRARY_PATH"), str(toolkit / "lib64" / "stubs"))
        changed["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    found = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))  # next to this Python
    if found is not None:
        commands = building / "bin"
        commands.mkdir()
        command = f"exec '{sys.executable}' -IS '{ninja.__file__}' {os.getpid()} '{found}' \"$@\""
        (commands / "ninja").write_text(f"#!/bin/sh\n{command}\n")
        (commands / "ninja").chmod(0o755)
        changed["PATH"] = f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with restore_variables(changed):
        os.environ.update(changed)
        yield


def _import_extension(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
