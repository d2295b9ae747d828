"""DeepSpeed's C++ operators: checked for a compiler, compiled once per version and processor, kept and loaded."""

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

from lightning_paral.compat.deepspeed.operators import is_for_cuda, load_operators_by
from lightning_paral.engines.zero.runtime import ninja
from lightning_paral.engines.zero.runtime.deepspeed import variables_as_before
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
    """Load an operator into this process. If it is not on this host yet, compile it first, which takes minutes.

    Of several ranks, the first compiles, and the others wait.

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


_VARIABLES = ("CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")
"""Environment variables that compilers read."""


def operators_kept() -> AbstractContextManager[None]:
    """Return a context in which DeepSpeed loads its operators from `folder_of`, or compiles them into that folder."""
    return load_operators_by(_load)


def _load(builder: Any, compile_and_load: Callable[[], Any]) -> Any:
    folder = folder_of(builder)
    kept = folder / f"{builder.name}.so"
    if kept.is_file():
        return _imported(builder.name, kept)
    toolkit = _toolkit_for(builder)
    rank_zero_info(
        f"Compiling DeepSpeed's operator {builder.name!r}, which takes a few minutes. This is done once for these "
        f"versions of torch and DeepSpeed and this kind of processor; the result is kept in {folder}."
    )
    start = time.monotonic()
    with _turn(folder, builder.name):
        if kept.is_file():
            return _imported(builder.name, kept)  # another rank has compiled it
        # Each build has its own folder: torch's lock stays in that of a killed run, and others would wait for it.
        for left in folder.glob(f"{builder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=f"{builder.name}-", dir=folder))
        with _environment(building, toolkit):
            module = compile_and_load()
        os.replace(module.__file__, kept)
        module.__file__ = str(kept)
        shutil.rmtree(building, ignore_errors=True)
    rank_zero_info(f"Compiled {builder.name!r} in {time.monotonic() - start:.0f} s.")
    return module


def folder_of(builder: Any) -> Path:
    """Return the folder that keeps the operator of `builder`, named by all that its machine code depends on.

    It is below TORCH_EXTENSIONS_DIR if that is set, else in the user's cache, for all virtual environments.
    """
    import deepspeed

    on_cuda = torch.cuda.is_available()
    depends_on = [
        *(deepspeed.__version__, torch.__version__, torch.version.cuda, sysconfig.get_config_var("SOABI")),
        *(platform.machine(), _processor()),
        *(os.environ.get(name) for name in _VARIABLES),
        *(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count() if on_cuda else 0)),
    ]
    if is_for_cuda(builder):  # CPU builders have the same names
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
            f"DeepSpeed's operator {builder.name!r} is compiled with the CUDA toolkit, and there is none: CUDA_HOME is "
            f"not set, and nvcc is not on PATH. Install the toolkit of CUDA {torch.version.cuda}, or do without the "
            "operator: torch.optim.AdamW(fused=True) needs none."
        )
    return Path(home)


def _cuda_home() -> str | None:
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME


def _processor() -> str:
    # Operators are compiled for the instructions of the processor that is there.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextmanager
def _turn(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock on compiling `name`, on this host or disk. A process that ends releases it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        turn = open(folder / f"{name}.turn", "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigurationError(
            f"DeepSpeed's operator {name!r} has to be compiled, and kept in {folder}, where nothing can be written: "
            f"{error}. Set TORCH_EXTENSIONS_DIR to a folder where this process may write."
        ) from error
    with turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


@contextmanager
def _environment(building: Path, toolkit: Path | None) -> Iterator[None]:
    """Make torch build in `building`, with a ninja that ends with this process.

    If the driver's library lacks the link that linkers look for, they find the stub in the CUDA `toolkit`.
    """
    changed = {"TORCH_EXTENSIONS_DIR": str(building)}
    if toolkit is not None:
        paths = (os.environ.get("LIBRARY_PATH"), str(toolkit / "lib64" / "stubs"))
        changed["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    found = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))  # if not activated
    if found is not None:
        commands = building / "bin"
        commands.mkdir()
        command = f"exec '{sys.executable}' -IS '{ninja.__file__}' {os.getpid()} '{found}' \"$@\""
        (commands / "ninja").write_text(f"#!/bin/sh\n{command}\n")
        (commands / "ninja").chmod(0o755)
        changed["PATH"] = f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with variables_as_before(changed):
        os.environ.update(changed)
        yield


def _imported(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
