"""`paral verify`: is a checkpoint complete and undamaged?"""

import argparse
import sys

from lightning_paral.checkpoint.integrity import DamagedError, check


def verify(arguments: list[str]) -> None:
    """Check a checkpoint: its manifest, sizes and checksums of its files, and that every tensor is covered once."""
    parser = argparse.ArgumentParser(prog="paral verify", description=verify.__doc__)
    parser.add_argument("checkpoint", help="a path or URL")
    parser.add_argument("--trust", action="store_true", help="make objects of any type; runs code that it may hold")
    options = parser.parse_args(arguments)
    path = options.checkpoint
    try:
        manifest = check(path, weights_only=not options.trust)
    except DamagedError as error:
        sys.exit("\n".join(f"paral: {fault}" for fault in error.faults))
    if manifest is None:
        print(f"{path}: opens, and its tensors are covered; it has no manifest to check its bytes by.")
    else:
        size_bytes = sum(record.bytes for record in manifest.files.values())
        print(f"{path}: complete and undamaged, {len(manifest.files)} files, {size_bytes:,} bytes.")
