"""Offload to NVMe: checks before a run, DeepSpeed's C++ operators, and the files of a run."""

import atexit
import fcntl
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import IO

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn import Module

from lightning_paral.compat.deepspeed.engine import load_compiled
from lightning_paral.engines.zero.options import ZeROOptions
from lightning_paral.engines.zero.partition import count_trained, full_numel
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.host_memory_check import host_memory_shortage

_AIO_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"

_BUILDERS = {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
"""DeepSpeed's operators for NVMe, in the order in which they are loaded: `async_io` has the symbols of `pin_memory`."""

_MAX_SECONDS = 1800.0
"""How long operators may compile. They take minutes, several times as long on a busy machine."""


def check_compiler(option: str) -> None:
    """Raise a `ConfigurationError` if this node cannot compile DeepSpeed's operators for NVMe, which `option` needs."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigurationError(
            f"{option} compiles a C++ operator at first use, but there is no compiler {compiler!r}. Install one "
            "(Debian: apt-get install g++) or set CXX."
        )
    command = [compiler, "-x", "c++", "-", "-o", os.devnull, "-laio"]
    if subprocess.run(command, input=_AIO_PROGRAM, text=True, capture_output=True).returncode != 0:
        raise ConfigurationError(
            f"{option} needs libaio and its header, which {compiler!r} does not find. Install them (Debian: apt-get "
            "install libaio-dev; Red Hat: dnf install libaio-devel)."
        )


def load_operators(option: str) -> None:
    """Load DeepSpeed's operators for NVMe. Missing ones are compiled first, side by side, which takes minutes.

    If several ranks of a node need an operator, one compiles it and the others wait.

    Args:
        option: the name of the option that needs them, for messages.

    Raises:
        ConfigurationError: an operator does not compile, or not in time, or cannot be loaded. If it does not compile,
            the message ends with what the compiler says.
    """
    from deepspeed.git_version_info import installed_ops

    names = [name for name in _BUILDERS if not installed_ops.get(name)]
    files = {name: operator_folder() / f"{name}.so" for name in names}
    if not all(file.is_file() for file in files.values()):
        _compile(files, option)
    for name, file in files.items():
        try:
            load_compiled(name, file)
        except ImportError as error:
            raise ConfigurationError(
                f"DeepSpeed's operator {name!r}, which {option} needs, was compiled, but cannot be loaded: {error}. "
                f"Delete {file} to compile it again, or leave out {option}."
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


def _compile(files: Mapping[str, Path], option: str) -> None:
    """Compile those of `files` that are missing, unless another process of this user does so first."""
    folder = operator_folder()
    with ExitStack() as undo:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            turn = undo.enter_context(open(folder / "turn", "w"))
            fcntl.flock(turn, fcntl.LOCK_EX)  # the system releases it if this process ends
        except OSError as error:
            raise ConfigurationError(
                f"DeepSpeed's operators are compiled and kept in {folder}, which cannot be written or locked: {error}."
                " Set TORCH_EXTENSIONS_DIR to a folder that this process can write to."
            ) from error
        missing = [name for name, file in files.items() if not file.is_file()]
        if not missing:
            return
        rank_zero_info(
            f"Compiling DeepSpeed's operators {', '.join(missing)}, which takes a few minutes. This happens once for "
            f"these versions of torch and DeepSpeed and this type of processor; the result is kept in {folder}."
        )
        for left in folder.glob("building-*"):
            shutil.rmtree(left, ignore_errors=True)
        # Each build has its own folder: a killed build leaves torch's lock in it, for which later builds would wait.
        building = Path(undo.enter_context(TemporaryDirectory(prefix="building-", dir=folder)))
        start = time.monotonic()
        log = building / "log"
        with open(log, "w") as said, _build(missing, building, said) as build:
            try:
                build.wait(_MAX_SECONDS)
            except subprocess.TimeoutExpired:
                raise ConfigurationError(
                    f"DeepSpeed's operators {', '.join(missing)}, which {option} needs, were not compiled within "
                    f"{_MAX_SECONDS / 60:.0f} minutes. Start again when the machine is less busy."
                ) from None
        for name in missing:
            compiled = building / name / f"{name}.so"
            if not compiled.is_file():
                raise ConfigurationError(
                    f"{option} needs DeepSpeed's operator {name!r}, which cannot be compiled on this node. It needs a "
                    "C++ compiler (CXX, or g++), Python's headers (Debian: apt-get install python3-dev), ninja (pip "
                    "install ninja), libaio and its header, but no CUDA toolkit. Fix the error below, use "
                    f'Offload("cpu"), or leave out {option}.\n{log.read_text()[-8000:]}'
                )
            os.replace(compiled, files[name])
        rank_zero_info(f"Compiled {', '.join(missing)} in {time.monotonic() - start:.0f} s.")


_PROGRAM = """
import os, signal, sys, threading
def end():
    sys.stdin.read()  # until the parent closes it, or ends
    os.killpg(0, signal.SIGTERM)  # ninja, which has each compiler in a group of its own, ends them
threading.Thread(target=end, daemon=True).start()
from deepspeed.ops import op_builder
for name in sys.argv[1:]:
    threading.Thread(target=getattr(op_builder, name)().jit_load, args=(False,)).start()
"""


def _build(names: list[str], folder: Path, said: IO[str]) -> "subprocess.Popen[bytes]":
    """Compile operators to `folder` in a process of its own, which ends when its input is closed or this process ends.

    They are compiled as for a machine without accelerators: they use no CUDA, but on a machine with GPUs DeepSpeed
    would require the CUDA toolkit. The process may fail to import `async_io`, which needs `pin_memory`, after that.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)))  # ninja may be there
    own = {"DS_ACCELERATOR": "cpu", "PATH": path, "TORCH_EXTENSIONS_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *(_BUILDERS[name] for name in names)],
        env=os.environ | own | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


# NVMe


def check_folder(path: str | Path) -> None:
    """Raise a `ConfigurationError` unless `path` is a folder that can be written with direct I/O."""
    if not Path(path).is_dir():
        raise ConfigurationError(f"Offload('nvme', path={str(path)!r}): there is no such folder. Create it first.")
    try:
        with NamedTemporaryFile(dir=path, prefix="paral_zero_probe_") as probe:
            descriptor = os.open(probe.name, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as block:  # direct I/O needs page-aligned memory
                    os.write(descriptor, block)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(
            f"Offload('nvme', path={str(path)!r}) cannot be written with direct I/O ({error.strerror}), which "
            "DeepSpeed uses. Choose a folder that this user owns on a local disk (ext4, xfs), not on a network share."
        ) from error


def check_free_space(path: str | Path, needed_bytes: int) -> None:
    """Raise a `ConfigurationError` if the disk of `path` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes:
        raise ConfigurationError(
            f"Offload('nvme', path={str(path)!r}): the ranks of this node will write about {needed_bytes / 1e9:.2f} GB "
            f"there, but only {free_bytes / 1e9:.2f} GB are free. Free some space, choose another disk, or use more "
            "nodes."
        )


def check_offload(options: ZeROOptions) -> None:
    """Raise a `ConfigurationError` if this node lacks a compiler, a library or a folder that `options` need."""
    for option, offload in options.on_nvme.items():
        check_compiler(option)
        assert offload.path is not None
        check_folder(offload.path)


def check_size(options: ZeROOptions, module: Module, threshold: int, num_shards: int, ranks_per_node: int) -> None:
    """Raise a `ConfigurationError` if NVMe has no room for `module`, or cannot store it. *Collective*.

    Args:
        options: the options of the strategy.
        module: the module. The buffers are not checked for parameters that are partitioned.
        threshold: the number of elements up to which parameters are not partitioned.
        num_shards: the number of shards of a parameter.
        ranks_per_node: the number of ranks that write to the disks of this node.
    """
    num_elements = count_trained(module.parameters())
    for option, offload in options.on_nvme.items():
        assert offload.path is not None
        # For the optimizer: parameters, gradients and two moments, all fp32. For parameters: one copy, at most fp32.
        num_bytes = (16 if option == "offload_optimizer" else 4) * num_elements * ranks_per_node // num_shards
        check_free_space(offload.path, num_bytes)
    buffered = options.on_nvme.get("offload_parameters")
    if buffered is None:
        return
    for name, parameter in module.named_parameters():
        needed = -(-full_numel(parameter) // num_shards)
        if full_numel(parameter) > threshold and not parameter.requires_grad:
            raise ConfigurationError(
                f"{name} is frozen, and offload_parameters='nvme' stores trained parameters only. Use "
                "offload_parameters='cpu', with the optimizer on NVMe."
            )
        if full_numel(parameter) > threshold and needed > buffered.buffer_numel:
            raise ConfigurationError(
                f"offload_parameters=Offload('nvme', buffer_numel={buffered.buffer_numel}) is too small: a rank's "
                f"shard of {name} has {needed} elements. Set buffer_numel to at least that."
            )
    shortage = host_memory_shortage(num_elements * 4, ranks_per_node)
    if shortage is not None:
        rank_zero_warn(
            f"The files on NVMe are removed when the fit ends, and the module cannot be returned in full: {shortage}. "
            "Its weights will be in checkpoints only."
        )


def make_folders(options: ZeROOptions, run: str, rank: int, undo: ExitStack) -> dict[str, Path]:
    """Create a folder of this rank for each offload to NVMe, and return them by the names of the offloads in DeepSpeed.

    Args:
        options: the options of the strategy.
        run: a unique name of the run, the same on all ranks.
        rank: the global rank of this process.
        undo: removes the folders when it is closed. When this process exits, those of killed ranks go as well.
    """
    folders = {}
    for option, offload in options.on_nvme.items():
        assert offload.path is not None
        folder = Path(offload.path, f"paral_zero_{run[:12]}", f"rank{rank}")
        folder.mkdir(parents=True, exist_ok=True)
        undo.callback(_remove, folder)
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
        folders["offload_optimizer" if option == "offload_optimizer" else "offload_param"] = folder
    return folders


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it contains folders of other ranks
        folder.parent.rmdir()
