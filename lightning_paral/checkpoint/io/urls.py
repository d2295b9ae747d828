"""URLs of checkpoints: the fsspec file systems behind them, and copies of files to and from them."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_paral.checkpoint.ownership import check_replaceable_at
from lightning_paral.errors import CheckpointError

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}

COPY_NAME = re.compile(r"\S+/lightning_paral_\w+\.copy")
"""Matches the paths of local copies of files at URLs, see `get_file`."""


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        CheckpointError: no installed package supports the scheme of the URL.
    """
    try:
        fs, path = url_to_fs(url)
        fs.invalidate_cache()  # it caches listings and sizes, which other ranks may have changed
        return fs, path
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(url.split("://")[0])
        remedy = f"Run pip install 'lightning_paral[{extra}]'." if extra else "Use a scheme that fsspec supports."
        raise CheckpointError(f"{url} cannot be accessed: {error}. {remedy}") from error


def is_remote(path: object) -> bool:
    """Return whether `path` is a URL of a file system other than the operating system's."""
    return "://" in str(path) and type(file_system(str(path))[0]) is not LocalFileSystem


def without_scheme(path: object) -> str:
    """Return `path` without `file://`; other URLs are returned unchanged."""
    return str(path) if "://" not in str(path) or is_remote(path) else file_system(str(path))[1]


def put_file(source: Path, url: str) -> None:
    """Copy a local file to a URL, replacing a file or checkpoint there.

    Raises:
        CheckpointError: a folder that is not a checkpoint exists at the URL.
    """
    fs, path = file_system(url)
    fs.makedirs(path.rpartition("/")[0] or fs.root_marker, exist_ok=True)
    check_replaceable_at(fs, path, url, folder=False)
    if not fs.isdir(path):
        fs.put_file(str(source), path)
        return
    sibling = f"{path}.{source.name}"
    fs.put_file(str(source), sibling)  # before the folder is removed, because this may fail
    fs.rm(path, recursive=True)
    fs.mv(sibling, path)


def get_file(url: str) -> Path | None:
    """Copy the file at a URL to a temporary file, and return the path of the copy; `None` if there is no file."""
    fs, path = file_system(url)
    if not fs.isfile(path):
        return None
    descriptor, name = tempfile.mkstemp(prefix="lightning_paral_", suffix=".copy")
    os.close(descriptor)
    fs.get_file(path, name)
    return Path(name)
