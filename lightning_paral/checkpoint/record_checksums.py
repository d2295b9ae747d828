"""Verify a file that another tool saved with `torch.save`: a zip archive with a CRC-32 for each record."""

import zipfile
import zlib
from pathlib import Path

from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError

_READ_BYTES = 2**20


def verify_records(path: str | Path, ranks: RankGroup) -> None:
    """Compare the checksums of all records, of which each rank reads a part. *Collective* over `ranks`.

    Files that were saved after `torch.serialization.set_crc32_options(False)` have no checksums and are accepted.

    Raises:
        CheckpointError: a record is damaged. Raised on all ranks, with the names of records.
    """
    by_rank = ranks.gather_results(f"Loading {path}", lambda: _check_records(path, ranks))
    damaged = [name for names, _ in by_rank for name in names]
    if damaged and len(damaged) < sum(count for _, count in by_rank):
        raise CheckpointError(f"{path} is damaged: the checksums of {', '.join(damaged[:5])} do not match.")


def _check_records(path: str | Path, ranks: RankGroup) -> tuple[list[str], int]:
    """Return the names of the damaged records among those of this rank, and how many records it has checked."""
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size][ranks.rank :: ranks.world_size]
        return [record.filename for record in records if not _is_sound(archive, record)], len(records)


def _is_sound(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as opened:
            while opened.read(_READ_BYTES):
                pass
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return False
    return True
