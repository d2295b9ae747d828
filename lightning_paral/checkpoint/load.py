"""Load a checkpoint: find it, verify it, and open it with tensors that are read when they are used."""

import logging
import time
from pathlib import Path
from typing import Any

from lightning_paral.checkpoint.find import read_current, read_manifest
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.reader import open_checkpoint
from lightning_paral.checkpoint.verify import verify_blocks
from lightning_paral.distributed.exchange import RankGroup

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
