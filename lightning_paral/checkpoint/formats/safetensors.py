"""Write weights as safetensors: one file, or several with an index.

Files that other tools wrote are never replaced, except the file that the user names.

A safetensors file is a JSON header followed by the data: https://huggingface.co/docs/safetensors
"""

import json
import os
import re
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.consolidate import STEP_BYTES, Cast, Progress, check_free_space, items_of
from lightning_paral.checkpoint.formats.full import write_all
from lightning_paral.checkpoint.io.atomic import AtomicPath
from lightning_paral.checkpoint.io.files import BackgroundFsync
from lightning_paral.checkpoint.lazy_tensor import flat_slices
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import bytes_of
from lightning_paral.errors import CheckpointError

Pairs = list[tuple[WriteItem, Tensor]]
"""The tensors to write, each with its values."""

_MARK = "writers"  # key of a metadata entry in files of this package
_OURS = "lightning_paral"  # its value
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error)
"""Errors that may occur while reading a file of an unknown format."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Layout:
    """The distribution of tensors over files."""

    files: dict[str, Pairs]
    """The tensors of each file, by file name."""
    index: str | None
    """The text of the index; `None` if there is one file."""


def pairs_of(weights: dict[str, Any]) -> Pairs:
    """Return the tensors of `weights`. Tied tensors occur once, under their first name, as safetensors requires."""
    return items_of({"state_dict": {name: v for name, v in weights.items() if isinstance(v, Tensor | Cast)}})


def divide(pairs: Pairs, stem: str, max_shard_bytes: int) -> Layout:
    """Divide tensors among files, which are named as Hugging Face names them.

    Args:
        pairs: the tensors.
        stem: the first part of the file names.
        max_shard_bytes: the maximum size of the tensors in a file, unless a single tensor is larger.
    """
    shards: list[Pairs] = [[]]
    nbytes = 0
    for pair in pairs:
        if shards[-1] and nbytes + pair[0].nbytes > max_shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(pair)
        nbytes += pair[0].nbytes
    if len(shards) == 1:
        return Layout({f"{stem}.safetensors": pairs}, None)
    files = {f"{stem}-{n + 1:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards)}
    index = {
        "metadata": {"total_size": sum(item.nbytes for item, _ in pairs), _MARK: _OURS},
        "weight_map": {str(item.path[1]): name for name, shard in files.items() for item, _ in shard},
    }
    return Layout(files, json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_safetensors(weights: dict[str, Any], out: Path, max_shard_bytes: int, progress: Progress) -> list[Path]:
    """Write weights to the file `out`, or, if they exceed `max_shard_bytes`, to several files next to it and an index.

    Files that an earlier call wrote for `out` are replaced or removed.

    Args:
        weights: tensors by name; other values are ignored.
        out: the path of the file, ending in `.safetensors`.
        max_shard_bytes: the maximum size of the tensors in a file, unless a single tensor is larger.
        progress: called after each write.

    Returns:
        list[Path]: the files written.

    Raises:
        CheckpointError: a file that this package did not write would be replaced or removed, or the disk does not have
            enough free space. Nothing was written.
    """
    pairs = pairs_of(weights)
    layout = divide(pairs, out.stem, max_shard_bytes)
    index_path = out.with_name(out.name + ".index.json")
    outdated = _outdated(out, index_path, layout)
    check_free_space(out.parent, sum(item.nbytes for item, _ in pairs))
    with ExitStack() as drafts:
        written = []
        for name, shard in layout.files.items():
            written.append(drafts.enter_context(AtomicPath(out.with_name(name), folder=False)))
            write_shard(shard, written[-1].path, progress)
        if layout.index is not None:
            written.append(drafts.enter_context(AtomicPath(index_path, folder=False)))
            written[-1].path.write_text(layout.index)
        for draft in written:
            draft.commit()
        for path in outdated:  # readers accept a single file or an index: if both exist, they may load the wrong one
            path.unlink(missing_ok=True)
        return [draft.target for draft in written]


def _outdated(out: Path, index_path: Path, layout: Layout) -> list[Path]:
    """Return the files that an earlier call wrote for `out` and this call does not replace.

    Raises:
        CheckpointError: a file that this package did not write would be removed, or would be replaced although the user
            did not name it.
    """
    before = []
    if os.path.lexists(index_path):
        index = _own_index(index_path)
        if index is None:
            raise _not_ours_error(index_path)
        before = [index_path, *(out.with_name(name) for name in _shards_in(index, out.stem))]
    if layout.index is not None and os.path.lexists(out):
        before.append(out)
    replaced = [out.with_name(name) for name in layout.files if layout.index is not None]
    for path in (*replaced, *before):
        if path != index_path and os.path.lexists(path) and not is_ours(path):
            raise _not_ours_error(path)
    kept = {*replaced, index_path} if layout.index is not None else {out}
    return [path for path in before if path not in kept]


def _not_ours_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} exists but was not written by `paral consolidate`, so it is neither replaced nor removed. Move it, or "
        "write elsewhere."
    )


def _own_index(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with suppress(*_READ_ERRORS):
        index = json.loads(path.read_text())
        if index["metadata"][_MARK] == _OURS and isinstance(index["weight_map"], dict):
            return dict(index["weight_map"])
    return None


def _shards_in(weight_map: dict[str, Any], stem: str) -> list[str]:
    """Return the names in an index that are valid names of shards. They cannot lead to another folder."""
    shard = re.compile(re.escape(stem) + r"-\d{5,}-of-\d{5,}\.safetensors")
    return sorted({name for name in weight_map.values() if isinstance(name, str) and shard.fullmatch(name)})


def is_ours(path: Path) -> bool:
    """Return whether `path` is a safetensors file with the mark of this package in its header."""
    if not path.is_file():  # opening a FIFO would block
        return False
    with suppress(*_READ_ERRORS), open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length <= min(_MAX_HEADER_BYTES, path.stat().st_size):
            header = json.loads(file.read(length))
            return bool(header["__metadata__"][_MARK] == _OURS)
    return False


def write_shard(shard: Pairs, path: Path, progress: Progress) -> None:
    """Write tensors to the safetensors file `path`.

    Raises:
        CheckpointError: safetensors does not support the dtype of a tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _MARK: _OURS}}
    position = 0
    for item, _ in shard:
        dtype = _DTYPES.get(item.dtype)
        if dtype is None:
            raise CheckpointError(
                f"safetensors does not support {item.dtype}, the dtype of {item.path[1]}. Choose another with --dtype."
            )
        header[str(item.path[1])] = {
            "dtype": dtype,
            "shape": list(item.shape),
            "data_offsets": [position, position + item.nbytes],
        }
        position += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file, BackgroundFsync(file.fileno()) as fsync:
        write_all(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text), 0)
        for item, tensor in shard:
            offset = 8 + len(text) + header[str(item.path[1])]["data_offsets"][0]
            for values in flat_slices(tensor, STEP_BYTES):
                data = bytes_of(values.to(item.dtype))
                write_all(file.fileno(), data, offset)
                offset += len(data)
                fsync.wrote(len(data))
                progress(len(data))
        fsync.finish()
