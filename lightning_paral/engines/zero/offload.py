"""Offload to NVMe: checks before a run, DeepSpeed's C++ operators, and the files of a run."""

import atexit
import fcntl
import hashlib
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.nn import Module

from lightning_paral.compat.deepspeed.process import is_in_file_only, load_compiled
from lightning_paral.engines.zero.options import ZeROOptions
from lightning_paral.engines.zero.partition import count_trained
from lightning_paral.errors import ConfigurationError

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
    folder = operator_folder()
    missing = [name for name in names if not (folder / f"{name}.so").is_file()]
    if missing:
        _compile(missing, folder, option)
    for name in names:
        file = folder / f"{name}.so"
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


def _compile(names: Sequence[str], folder: Path, option: str) -> None:
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
                    f"DeepSpeed's operator {name!r}, which {option} needs, was not compiled within "
                    f"{_MAX_SECONDS / 60:.0f} minutes. Start again when the machine is less busy."
                ) from None
            if compiler.returncode != 0:
                raise ConfigurationError(_explain(name, option, said))
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

    DeepSpeed's operators for NVMe use no CUDA, but on a machine with GPUs it would require the CUDA toolkit.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)))  # ninja may be there
    imported_from = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name, str(folder), str(os.getpid())],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "PATH": path, "PYTHONPATH": imported_from},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


_PROGRAM = f"import sys; from {__name__} import compile_operator; compile_operator(*sys.argv[1:])"


def compile_operator(name: str, folder: str, parent: str) -> None:
    """Compile the operator `name` to a file in `folder`, unless another process does so first.

    This is run in a process of its own, which ends, with its compilers, when the process `parent` ends. Each build has
    its own folder: a killed build leaves torch's lock file in it, and any later build in that folder would wait for
    the lock forever.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # this process ends after ninja, which gets the signal too
    Thread(target=_end_after, args=(int(parent),), daemon=True).start()
    with open(Path(folder, f"{name}.turn"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # the system releases it if this process ends
        if Path(folder, f"{name}.so").is_file():
            return
        for left in Path(folder).glob(f"{name}-*"):
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
        os.replace(compiled, Path(folder, compiled.name))
        shutil.rmtree(building, ignore_errors=True)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    # ninja has each compiler in a group of its own, and ends them if it is terminated, but not if it is killed.
    os.killpg(os.getpgid(0), signal.SIGTERM)
    time.sleep(2.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _explain(name: str, option: str, said: str) -> str:
    return (
        f"{option} needs DeepSpeed's operator {name!r}, which cannot be compiled on this node. It needs a C++ compiler "
        "(CXX, or g++), Python's headers (Debian: apt-get install python3-dev), ninja (pip install ninja), libaio and "
        f'its header, but no CUDA toolkit. Fix the error below, use Offload("cpu"), or leave out {option}.\n'
        f"{said[-8000:]}"
    )


# NVMe

_BLOCK_BYTES = 4096


def check_folder(path: str | Path) -> None:
    """Raise a `ConfigurationError` unless `path` is a folder that can be written with direct I/O."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigurationError(f"Offload('nvme', path={str(path)!r}): there is no such folder. Create it first.")
    try:
        descriptor, probe = tempfile.mkstemp(dir=folder, prefix="paral_zero_probe_")
    except OSError as error:
        raise ConfigurationError(
            f"Offload('nvme', path={str(path)!r}) cannot be written: {error.strerror}. Choose a folder this user owns."
        ) from error
    os.close(descriptor)
    try:
        _write_directly(probe)
    except OSError as error:
        raise ConfigurationError(
            f"Offload('nvme', path={str(path)!r}): its file system does not support direct I/O ({error.strerror}), "
            "which DeepSpeed uses to read and write. Choose a folder on a local disk (ext4, xfs), not on tmpfs or a "
            "network share."
        ) from error
    finally:
        os.unlink(probe)


def _write_directly(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # direct I/O needs page-aligned memory
            os.write(descriptor, block)
    finally:
        os.close(descriptor)


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
    """Raise a `ConfigurationError` if `module` is too large for a disk or for the buffers of offload to NVMe.

    Args:
        options: the options of the strategy.
        module: the module. The buffers are not checked for parameters that are partitioned.
        threshold: the number of elements up to which parameters are not partitioned.
        num_shards: the number of shards of a parameter.
        ranks_per_node: the number of ranks that write to the disks of this node.
    """
    num_elements = count_trained(module.parameters()) * ranks_per_node // num_shards
    for option, offload in options.on_nvme.items():
        assert offload.path is not None
        # For the optimizer: parameters, gradients and two moments, all fp32. For parameters: one copy, at most fp32.
        check_free_space(offload.path, num_elements * (16 if option == "offload_optimizer" else 4))
    buffered = options.on_nvme.get("offload_parameters")
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters() if parameter.numel() > threshold}
    if buffered is None or not sizes:
        return
    largest = max(sizes, key=sizes.__getitem__)
    needed = -(-sizes[largest] // num_shards)
    if needed > buffered.buffer_numel:
        raise ConfigurationError(
            f"offload_parameters=Offload('nvme', buffer_numel={buffered.buffer_numel}) is too small: a rank's shard of "
            f"{largest} has {needed} elements. Set buffer_numel to at least that."
        )


class RunFolders:
    """Creates the subfolders of a run on NVMe, and removes them after it."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._rank = 0

    def make(self, options: ZeROOptions, run: str, rank: int) -> dict[str, Path]:
        """Create a subfolder for each offload to NVMe, and return them by the names of the offloads in DeepSpeed.

        Args:
            options: the options of the strategy.
            run: a unique name of the run, the same on all ranks.
            rank: the global rank of this process.
        """
        self._rank = rank
        folders = {}
        for option, offload in options.on_nvme.items():
            assert offload.path is not None
            folder = Path(offload.path) / f"paral_zero_{run[:12]}"
            folder.mkdir(exist_ok=True)
            atexit.register(_remove, folder)
            folders["offload_optimizer" if option == "offload_optimizer" else "offload_param"] = folder
        self._paths += folders.values()
        return folders

    def leave(self, module: Module | None) -> None:
        """Remove this rank's files, except shards of `module` that are stored nowhere else, until the process ends.

        Files of other ranks are kept, because they may still be in use. Files of a killed rank are removed when another
        rank of its node exits.
        """
        keeps = module is not None and any(map(is_in_file_only, module.parameters()))
        for folder in self._paths:
            _remove_rank(folder / "zero_stage_3" / "optimizer" if keeps else folder, self._rank)
        self._paths = []


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_rank(folder: Path, rank: int) -> None:
    """Remove the files that `rank` wrote below `folder`, and the folders that are empty afterwards."""
    for inner in (Path(name) for name, _, _ in os.walk(folder, topdown=False)):
        if inner.name == f"rank{rank}":
            _remove(inner)
        elif not inner.name.startswith("rank"):  # another rank may still use an empty folder
            with suppress(OSError):  # it contains folders of other ranks
                inner.rmdir()
