"""Offload to host memory and to NVMe: checks before a run, and the files of a run."""

import atexit
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from torch.nn import Module

from lightning_paral.compat.deepspeed.stage3 import is_in_file_only
from lightning_paral.engines.zero.options import ZeROOptions
from lightning_paral.engines.zero.partition import count_trained
from lightning_paral.engines.zero.runtime.operators import check_compiler, load_operators
from lightning_paral.errors import ConfigurationError

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
    if options.offload_optimizer is not None:
        check_compiler("offload_optimizer", needs_aio=False)
    for option, offload in options.on_nvme.items():
        check_compiler(option, needs_aio=True)
        assert offload.path is not None
        check_folder(offload.path)


def load_needed_operators(options: ZeROOptions, *, trains: bool) -> None:
    """Load the operators that a run with `options` needs.

    Call this after the checks of the run: compiling them may take minutes.

    Raises:
        ConfigurationError: an operator does not compile.
    """
    needed = {}
    if options.on_nvme:
        needed["async_io"] = next(iter(options.on_nvme))
    if trains and options.offload_optimizer is not None:
        needed["cpu_adam"] = "offload_optimizer"
    if needed:
        load_operators(needed)


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
