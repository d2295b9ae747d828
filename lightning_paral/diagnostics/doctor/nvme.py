"""The folder for offload to NVMe: whether it can be used, and how fast it is."""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.engines.zero.options import PATH_VARIABLE
from lightning_paral.engines.zero.runtime.nvme import check_folder
from lightning_paral.errors import ConfigurationError
from lightning_paral.quantities import format_bytes

_FILE_BYTES = 64 * 2**20
_BLOCK_BYTES = 4 * 2**20


def nvme_fact(environment: Mapping[str, str] = os.environ, seconds: float = 10.0) -> Fact:
    """Return whether the folder PARAL_NVME_PATH allows direct I/O, and at which speed.

    Writes a file of 64 MiB, which is removed also if this process is killed while it is written.

    Args:
        environment: the environment variables.
        seconds: how long writing, and reading, may take. On a slower disk, the file is smaller.
    """
    path = environment.get(PATH_VARIABLE)
    if path is None:
        advice = f"export {PATH_VARIABLE}=/a/folder/on/a/local/disk"
        return Fact(name="NVMe", found=f"{PATH_VARIABLE} is not set", state="note", advice=advice)
    try:
        check_folder(path)
    except ConfigurationError as error:
        return Fact(name="NVMe", found=f"{path} cannot be used", state="broken", advice=str(error), data={"path": path})
    free = shutil.disk_usage(path).free
    data = {"path": path, "free": free}
    if free < 2 * _FILE_BYTES:
        found = f"{path}: only {format_bytes(free)} free"
        return Fact(name="NVMe", found=found, state="broken", advice="Free some space on this disk.", data=data)
    try:
        written, write, read = measure(path, seconds)
    except OSError as error:
        found, advice = f"{path}: {error.strerror}", "Look at the disk with `dmesg`, or choose another folder."
        return Fact(name="NVMe", found=found, state="broken", advice=advice, data=data)
    found = (
        f"{path}: writes {format_bytes(write)}/s, reads {format_bytes(read)}/s, {format_bytes(free)} free, direct I/O"
    )
    data |= {"write": write, "read": read, "direct": True}
    if written < _FILE_BYTES:
        advice = f"The disk is slow: {format_bytes(written)} took more than {seconds:.0f} s. Choose a local NVMe disk."
        return Fact(name="NVMe", found=found, state="warning", advice=advice, data=data)
    return Fact(name="NVMe", found=found, data=data)


def measure(folder: str | Path, seconds: float) -> tuple[int, float, float]:
    """Write and read a file with direct I/O, in one thread.

    Args:
        folder: a folder whose file system supports direct I/O.
        seconds: how long writing, and reading, may take. After that, no further block is begun.

    Returns:
        The size of the file in bytes, and the speeds of writing and of reading it, in bytes per second.

    Raises:
        OSError: the file cannot be written or read.
    """
    descriptor, path = tempfile.mkstemp(dir=folder, prefix="paral_doctor_")
    os.close(descriptor)
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    finally:
        os.unlink(path)  # the open file remains until it is closed
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # direct I/O needs page-aligned memory
            block.write(os.urandom(2**16) * (_BLOCK_BYTES // 2**16))  # some disks compress
            start = time.perf_counter()
            written = 0
            while written < _FILE_BYTES and (not written or time.perf_counter() < start + seconds):
                written += os.write(descriptor, block)
            os.fsync(descriptor)
            write = written / (time.perf_counter() - start)
            os.lseek(descriptor, 0, os.SEEK_SET)
            start = time.perf_counter()
            done = 0
            while done < written and (not done or time.perf_counter() < start + seconds):
                done += os.readv(descriptor, [block])
            read = done / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
    return written, write, read
