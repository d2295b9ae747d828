"""Checking a checkpoint from end to end: files, checksums, and that boxes cover every tensor once and can be read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.damage import faults_of, naming
from lightning_paral.checkpoint.io.storage import is_remote
from lightning_paral.checkpoint.layout import coverage_fault
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk
from lightning_paral.checkpoint.load import open_checkpoint
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.resolve import read_manifest, read_present
from lightning_paral.checkpoint.save_plan import tensors_in
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError


class DamagedError(CheckpointError):
    """A checkpoint is damaged or incomplete; `faults` says where."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def check(path: str | Path, *, weights_only: bool = True) -> Manifest | None:
    """Return the manifest of the checkpoint at `path`, complete and undamaged; `None` if it is of another tool.

    The latter is checked as far as it can be: that it opens, that boxes cover it, and that each of them can be read.
    `weights_only=False` trusts it.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        DamagedError: it is not what was written.
    """

    def read(here: str | Path) -> Manifest | None:
        manifest = read_manifest(here)
        faults = [] if manifest is None else list(faults_of(here, manifest, RankGroup()))
        with naming(here):
            if not faults:
                checkpoint = open_checkpoint(here, weights_only=weights_only, manifest=manifest)
                # Behind a URL, what our checksums have just read is not fetched a second time.
                faults = list(_faults_of_tensors(checkpoint, read=manifest is None or not is_remote(here)))
        if faults:
            raise DamagedError(faults)
        return manifest

    return read_present(path, RankGroup(), read)


def verify(path: str | Path) -> list[str]:
    """Return all that is wrong with the checkpoint at `path`; nothing if it is complete and undamaged."""
    try:
        check(path)
    except DamagedError as error:
        return error.faults
    except CheckpointError as error:
        return [str(error)]
    return []


def _faults_of_tensors(checkpoint: dict[str, Any], *, read: bool) -> Iterator[str]:
    for name, tensor in named_tensors(checkpoint):
        if not isinstance(tensor, LazyTensor):
            continue
        fault = coverage_fault(tensor.shape, [piece.chunk for piece in tensor.pieces])
        if fault is not None:
            yield f"{name}: {fault}"
        if read:
            distinct = {(piece.place, piece.chunk.sizes): piece for piece in tensor.pieces}
            fault = next(filter(None, map(_unreadable, distinct.values())), None)
            if fault is not None:
                yield f"{name}: {fault}"


def _unreadable(piece: StoredChunk) -> str:
    try:
        piece.values()
    except CheckpointError as error:
        return str(error)
    return ""


def named_tensors(checkpoint: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return weights by name, then optimizer states by parameter name and key, tied ones once."""
    found = {f"state_dict.{name}": value for name, value in checkpoint.get("state_dict", {}).items()}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        names = _names_of(state)
        for key, of_parameter in state.get("state", {}).items():
            for (kind, *_), value in tensors_in(of_parameter):
                found[f"optimizer_{number}.{names.get(key, key)}.{kind}"] = value
    return [(name, value) for name, value in found.items() if isinstance(value, Tensor)]


def _names_of(state: dict[str, Any]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for group in state.get("param_groups", []):
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    return names
