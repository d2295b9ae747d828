"""Check that a checkpoint is complete and undamaged: every file by its checksums, every tensor by its chunks."""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.io.files import FileRecord
from lightning_paral.checkpoint.io.storage import Folder, folder_at
from lightning_paral.checkpoint.io.urls import is_remote
from lightning_paral.checkpoint.layout import coverage_fault
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.reader import open_checkpoint
from lightning_paral.checkpoint.resolve import explain_read_errors, read_current, read_manifest
from lightning_paral.checkpoint.tree import tensors_in
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError


class DamagedError(CheckpointError):
    """A checkpoint is damaged or incomplete. `faults` has a description of each fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def check(path: str | Path, *, weights_only: bool = True) -> Manifest | None:
    """Check the checkpoint at `path` in this process, and return its manifest; `None` if another tool saved it.

    For a checkpoint without a manifest, check that it can be opened, that chunks cover every tensor, and that each
    chunk can be read.

    Args:
        path: the path of a file or folder, or a URL.
        weights_only: `False` trusts the checkpoint and runs code in it.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it cannot be read.
        DamagedError: the checkpoint differs from what was written.
    """

    def read(location: str | Path) -> Manifest | None:
        manifest = read_manifest(location)
        faults = [] if manifest is None else list(find_faults(location, manifest, RankGroup()))
        with explain_read_errors(location):
            if not faults:
                checkpoint = open_checkpoint(location, weights_only=weights_only, manifest=manifest)
                # For a URL, do not fetch data a second time if its checksums have just been verified.
                faults = list(_faults_of_tensors(checkpoint, read=manifest is None or not is_remote(location)))
        if faults:
            raise DamagedError(faults)
        return manifest

    return read_current(path, RankGroup(), read)


def verify(path: str | Path) -> list[str]:
    """Return every fault of the checkpoint at `path`; an empty list if it is complete and undamaged."""
    try:
        check(path)
    except DamagedError as error:
        return error.faults
    except CheckpointError as error:
        return [str(error)]
    return []


# Files


def verify_blocks(path: str | Path, manifest: Manifest, ranks: RankGroup) -> None:
    """Verify this rank's range of the blocks of all files.

    Raises:
        CheckpointError: files are damaged, truncated or missing. The message names them.
    """
    faults = list(find_faults(path, manifest, ranks))
    if faults:
        raise CheckpointError(f"The checkpoint is damaged, and nothing was loaded: {'; '.join(faults[:5])}.")


def verify_records(path: str | Path, ranks: RankGroup) -> None:
    """Verify a file that another tool saved with `torch.save`, by the CRC-32 of its records. *Collective* over `ranks`.

    Files that were saved after `torch.serialization.set_crc32_options(False)` have no checksums and are accepted.

    Raises:
        CheckpointError: a record is damaged. Raised on all ranks.
    """

    def find_damaged() -> str | None:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() if any(record.CRC for record in archive.infolist()) else None

    damaged = ranks.run_on_rank_0(f"Loading {path}", find_damaged)
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} does not match.")


def find_faults(path: str | Path, manifest: Manifest, ranks: RankGroup) -> Iterator[str]:
    """Yield a description of each fault in this rank's range of the blocks of all files.

    The blocks of all files, in the order of the ranks that wrote them, are divided evenly among the ranks. At an
    unchanged world size, a rank verifies roughly the blocks that it loads afterwards, so each node fetches a block from
    a shared disk once.
    """
    folder, names = _locate(path, manifest)
    files = sorted(manifest.files, key=lambda file: (len(file), file))  # puts `__10_0` after `__9_0`
    num_blocks = sum(max(1, len(manifest.files[file].blocks)) for file in files)
    of_rank = range(num_blocks * ranks.rank // ranks.world_size, num_blocks * (ranks.rank + 1) // ranks.world_size)
    first = 0
    for file in files:
        record, name = manifest.files[file], names[file]
        blocks = range(first, first + max(1, len(record.blocks)))  # an empty file counts as one block: it must exist
        first = blocks.stop
        common = range(max(blocks.start, of_rank.start), min(blocks.stop, of_rank.stop))
        if common:
            has_fixed_size = manifest.form != "full"  # in a full checkpoint, the manifest follows the recorded bytes
            yield from _faults_of_file(folder, name, record, [block - blocks.start for block in common], has_fixed_size)


def _locate(path: str | Path, manifest: Manifest) -> tuple[Folder, dict[str, str]]:
    """Return the folder of a checkpoint, and a dict that maps names in the manifest to names in that folder."""
    if manifest.form == "full":
        if not is_remote(path):
            path = os.path.realpath(path)
        return folder_at(Path(path).parent), {".": Path(path).name}
    return folder_at(path), {name: name for name in manifest.files}


def _faults_of_file(
    folder: Folder, file: str, record: FileRecord, blocks: list[int], has_fixed_size: bool
) -> Iterator[str]:
    """Yield a description of each fault in the given blocks of a file, or one if the file has the wrong size."""
    name, size = folder.name(file), folder.size(file)
    if size is None:
        yield f"{name} is missing"
    elif size < record.bytes or (has_fixed_size and size > record.bytes):
        yield f"{name} has {size} bytes instead of {record.bytes}"
    elif record.blocks:
        expected = [record.blocks[number] for number in blocks]
        found = folder.checksums(file, [(offset, length) for offset, length, _ in expected])
        for (offset, length, expected_sum), found_sum in zip(expected, found, strict=True):
            if found_sum != expected_sum:
                yield f"{name} is damaged between bytes {offset} and {offset + length}"


# Tensors


def _faults_of_tensors(checkpoint: dict[str, Any], *, read: bool) -> Iterator[str]:
    """Yield a description of each tensor whose chunks do not cover it or, with `read`, cannot be read."""
    for name, tensor in named_tensors(checkpoint):
        if not isinstance(tensor, LazyTensor):
            continue
        fault = coverage_fault(tensor.shape, [stored.chunk for stored in tensor.chunks])
        if fault is not None:
            yield f"{name}: {fault}"
        if read:
            distinct = {(stored.location, stored.chunk.sizes): stored for stored in tensor.chunks}
            fault = next(filter(None, map(_read_error, distinct.values())), None)
            if fault is not None:
                yield f"{name}: {fault}"


def _read_error(stored: StoredChunk) -> str:
    try:
        stored.read()
    except CheckpointError as error:
        return str(error)
    return ""


def named_tensors(checkpoint: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return all weights and optimizer states, each with a name such as `optimizer_0.layer.weight.exp_avg`."""
    found = {f"state_dict.{name}": value for name, value in checkpoint.get("state_dict", {}).items()}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        names: dict[Any, str] = {}
        for group in state.get("param_groups", []):
            names.update(zip(group["params"], group.get("param_names", ()), strict=False))
        for key, parameter_state in state.get("state", {}).items():
            for (state_key, *_), value in tensors_in(parameter_state):
                found[f"optimizer_{number}.{names.get(key, key)}.{state_key}"] = value
    return [(name, value) for name, value in found.items() if isinstance(value, Tensor)]
