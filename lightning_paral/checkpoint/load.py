"""Load a checkpoint, whose tensors are read when they are used, and check that it is complete and undamaged."""

import logging
import os
import time
import zipfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.find import read_current, read_manifest
from lightning_paral.checkpoint.lazy_tensor import LazyTensor
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.reader import open_checkpoint
from lightning_paral.checkpoint.storage import folder_at, is_remote
from lightning_paral.checkpoint.tree import tensors_in
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError, explain_read_errors

_log = logging.getLogger(__name__)


def load(path: str | Path, ranks: RankGroup, *, weights_only: bool = True) -> dict[str, Any]:
    """Verify the checkpoint at `path`, and return it in Lightning's format. *Collective* over `ranks`.

    Args:
        path: the path of a file or folder, or a URL; saved by this package or Lightning.
        ranks: the ranks that load together. Each verifies a part of the files.
        weights_only: `False` trusts the checkpoint and runs code in it.

    Returns:
        dict[str, Any]: the checkpoint, with tensors on the host: memory-mapped, or as `LazyTensor`.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it is damaged. Raised on all ranks, with the name of the
            file.
    """
    what = f"Loading {path}"
    started = time.monotonic()

    def read(location: str | Path) -> dict[str, Any]:
        # All ranks use the manifest that rank 0 read, so that all of them take the same branch.
        manifest = ranks.run_on_rank_0(what, lambda: read_manifest(location))
        if manifest is not None:
            ranks.run_on_all(what, lambda: verify_blocks(location, manifest, ranks))
        return ranks.run_on_all(what, lambda: open_checkpoint(location, weights_only=weights_only, manifest=manifest))

    checkpoint = read_current(path, ranks, read)
    if ranks.is_rank_0:
        _log.info("checkpoint verified and opened: %s, %.1f s", path, time.monotonic() - started)
    return checkpoint


def peek(path: str | Path, *, weights_only: bool = True) -> tuple[Manifest | None, dict[str, Any]]:
    """Return the manifest and the content of the checkpoint at `path` without verifying it, in this process only.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it cannot be read.
    """

    def read(location: str | Path) -> tuple[Manifest | None, dict[str, Any]]:
        manifest = read_manifest(location)
        return manifest, open_checkpoint(location, weights_only=weights_only, manifest=manifest)

    return read_current(path, RankGroup(), read)


class DamagedError(CheckpointError):
    """A checkpoint is damaged or incomplete. `faults` has a description of each fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def check(path: str | Path, *, weights_only: bool = True) -> Manifest | None:
    """Check the checkpoint at `path` in this process, and return its manifest; `None` if another tool saved it.

    Files are compared with the checksums in the manifest, if there is one. The checkpoint is opened, which checks that
    chunks cover every tensor, and each chunk is read.

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
                # Behind a URL, do not fetch data a second time if its checksums have just been verified.
                faults = [] if manifest is not None and is_remote(location) else list(_unreadable_tensors(checkpoint))
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
    is_one_file = manifest.form == "full"
    if is_one_file and not is_remote(path):
        path = os.path.realpath(path)
    folder = folder_at(Path(path).parent if is_one_file else path)
    files = sorted(manifest.files, key=lambda file: (len(file), file))  # puts `__10_0` after `__9_0`
    blocks = [(file, block) for file in files for block in manifest.files[file].blocks or (None,)]  # empty files too
    bounds = [len(blocks) * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1)]
    for file, pairs in groupby(blocks[slice(*bounds)], key=itemgetter(0)):
        record = manifest.files[file]
        found = Path(path).name if is_one_file else file
        name, size = folder.name(found), folder.size(found)
        if size is None:
            yield f"{name} is missing"
        elif size < record.bytes or (size > record.bytes and not is_one_file):  # the manifest follows in a full one
            yield f"{name} has {size} bytes instead of {record.bytes}"
        else:
            expected = [block for _, block in pairs if block is not None]
            sums = folder.checksums(found, [(offset, length) for offset, length, _ in expected])
            for (offset, length, total), found_sum in zip(expected, sums, strict=True):
                if found_sum != total:
                    yield f"{name} is damaged between bytes {offset} and {offset + length}"


def _unreadable_tensors(checkpoint: dict[str, Any]) -> Iterator[str]:
    """Yield a description of each tensor with a chunk that cannot be read."""
    for name, tensor in named_tensors(checkpoint):
        if isinstance(tensor, LazyTensor):
            try:
                for stored in tensor.chunks:
                    stored.read()
            except CheckpointError as error:
                yield f"{name}: {error}"


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
