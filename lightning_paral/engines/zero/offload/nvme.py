"""Offload to NVMe: whether a folder will do."""

import mmap
import os
import shutil
import tempfile
from pathlib import Path

from lightning_paral.errors import ConfigurationError

PATH_VARIABLE = "PARAL_NVME_PATH"
"""The environment variable that says which folder `strategy="paral_zero3_nvme"` uses."""

_BLOCK_BYTES = 4096


def check_folder(path: str | Path) -> None:
    """Raise a `ConfigurationError` unless `path` is a folder that can be written, past the page cache."""
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
            f"Offload('nvme', path={str(path)!r}): its file system does not do direct I/O ({error.strerror}), which "
            "DeepSpeed's asynchronous reads and writes are. Choose a folder on a local disk (ext4, xfs), not on tmpfs "
            "or a network share."
        ) from error
    finally:
        os.unlink(probe)


def _write_directly(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # direct I/O wants memory aligned to a page
            os.write(descriptor, block)
    finally:
        os.close(descriptor)


def check_space(path: str | Path, needed_bytes: int) -> None:
    """Raise a `ConfigurationError` if the disk of `path` has less free than all ranks of this host will write."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes:
        raise ConfigurationError(
            f"Offload('nvme', path={str(path)!r}): the ranks of this host will write about {needed_bytes / 1e9:.2f} GB "
            f"there, and {free_bytes / 1e9:.2f} GB are free. Make room, choose another disk, or use more hosts."
        )
