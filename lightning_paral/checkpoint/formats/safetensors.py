"""Write weights as safetensors: one file, or several with an index. Files of other tools are never replaced.

Follows https://huggingface.co/docs/safetensors: a header in JSON, then the data.
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
"""The tensors to be written, each with its values."""

_MARK = "writers"
_OURS = "lightning_paral"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error)
"""Errors while a file of another format is read."""
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
    """How tensors are divided among files."""

    files: dict[str, Pairs]
    """The tensors of each file, by name."""
    index: str | None
    """The text of the index; `None` for a single file."""


def pairs_of(weights: dict[str, Any]) -> Pairs:
    """Return the tensors of `weights`. Tied ones occur once, under their first name, as safetensors requires."""
    return items_of({"state_dict": {name: v for name, v in weights.items() if isinstance(v, Tensor | Cast)}})


def divide(pairs: Pairs, stem: str, max_shard_bytes: int) -> Layout:
    """Divide tensors among files of at most `max_shard_bytes`, or of one tensor, named as Hugging Face does."""
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

    Files that earlier calls wrote for `out`, and this one does not replace, are removed.

    Returns:
        list[Path]: the files written.

    Raises:
        CheckpointError: a file that no such call wrote would be replaced or removed. Nothing was written.
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
        for path in outdated:  # readers look for one file or an index: leave only one of them
            path.unlink(missing_ok=True)
        return [draft.target for draft in written]


def _outdated(out: Path, index_path: Path, layout: Layout) -> list[Path]:
    """Return the files that earlier calls wrote for `out` and this one does not replace.

    Raises:
        CheckpointError: a file that no such call wrote would be removed, or replaced without the user having named it.
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
        f"{path} is in the way, and `paral consolidate` did not write it: it is neither replaced nor removed. Move it, "
        "or write elsewhere."
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
    """Return the names in an index that are names of shards, which never lead to another folder."""
    shard = re.compile(re.escape(stem) + r"-\d{5,}-of-\d{5,}\.safetensors")
    return sorted({name for name in weight_map.values() if isinstance(name, str) and shard.fullmatch(name)})


def is_ours(path: Path) -> bool:
    """Whether `path` is a safetensors file with the mark of this package in its header."""
    if not path.is_file():  # opening a FIFO would block
        return False
    with suppress(*_READ_ERRORS), open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length <= min(_MAX_HEADER_BYTES, path.stat().st_size):
            header = json.loads(file.read(length))
            return bool(header["__metadata__"][_MARK] == _OURS)
    return False


def write_shard(shard: Pairs, path: Path, progress: Progress) -> None:
    """Write the safetensors file `path`.

    Raises:
        CheckpointError: a tensor is of a dtype that safetensors does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _MARK: _OURS}}
    position = 0
    for item, _ in shard:
        kind = _DTYPES.get(item.dtype)
        if kind is None:
            raise CheckpointError(
                f"safetensors does not support {item.dtype}, the dtype of {item.path[1]}. Choose a --dtype."
            )
        header[str(item.path[1])] = {
            "dtype": kind,
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
