"""`paral verify`: is a checkpoint complete and undamaged?"""

import argparse
import sys

from lightning_paral.checkpoint.loading import read_manifest
from lightning_paral.checkpoint.verify import verify


def print_faults(arguments: list[str]) -> None:
    """Check a checkpoint: its manifest, sizes and checksums of its files, and that every tensor is covered once."""
    parser = argparse.ArgumentParser(prog="paral verify", description=print_faults.__doc__)
    parser.add_argument("checkpoint")
    path = parser.parse_args(arguments).checkpoint
    faults = verify(path)
    if faults:
        sys.exit("\n".join(f"paral: {fault}" for fault in faults))
    manifest = read_manifest(path)
    if manifest is None:
        print(f"{path}: opens, and its tensors are covered; it has no manifest to check its bytes by.")
    else:
        size_bytes = sum(record.bytes for record in manifest.files.values())
        print(f"{path}: complete and undamaged, {len(manifest.files)} files, {size_bytes:,} bytes.")
