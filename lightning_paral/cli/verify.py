"""`paral verify`: check that a checkpoint is complete and undamaged."""

import sys

from lightning_paral.checkpoint.verify import DamagedError, check
from lightning_paral.cli.parser import CommandParser


def verify(arguments: list[str]) -> None:
    """Check the sizes and checksums of a checkpoint's files, and that its chunks cover each tensor exactly once."""
    parser = CommandParser(prog="paral verify", description=verify.__doc__)
    parser.add_argument("checkpoint", help="path or URL")
    parser.add_argument("--trust", action="store_true", help="create objects of any type; may run code in it")
    options = parser.parse_args(arguments)
    path = options.checkpoint
    try:
        manifest = check(path, weights_only=not options.trust)
    except DamagedError as error:
        sys.exit("\n".join(f"paral: {fault}" for fault in error.faults))
    if manifest is None:
        print(f"{path}: is readable, and its tensors are complete. It has no manifest, so no checksums were compared.")
    else:
        size_bytes = sum(record.bytes for record in manifest.files.values())
        print(f"{path}: complete and undamaged, {len(manifest.files)} files, {size_bytes:,} bytes.")
