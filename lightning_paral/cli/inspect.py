"""`paral inspect`: print the contents of a checkpoint."""

import json
from typing import Any

from tabulate import tabulate

from lightning_paral.checkpoint.load import peek
from lightning_paral.checkpoint.verify import named_tensors
from lightning_paral.cli.parser import CommandParser


def inspect(arguments: list[str]) -> None:
    """Print which strategy saved a checkpoint, at which step, and its tensors with their sizes."""
    parser = CommandParser(prog="paral inspect", description=inspect.__doc__)
    parser.add_argument("checkpoint", help="path or URL of a checkpoint of this package or Lightning")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--trust", action="store_true", help="create objects of any type; may run code in it")
    options = parser.parse_args(arguments)
    manifest, found = peek(options.checkpoint, weights_only=not options.trust)
    tensors: list[dict[str, Any]] = [
        {"name": name, "shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch."), "bytes": each.nbytes}
        for name, each in named_tensors(found)
    ]
    about = {
        "form": manifest.form if manifest else "of another tool",
        "strategy": manifest.strategy if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "epoch": found.get("epoch"),
        "global_step": found.get("global_step"),
        "bytes": sum(each["bytes"] for each in tensors),
    }
    if options.json:
        print(json.dumps(about | {"tensors": tensors}, indent=2))
    else:
        print(tabulate(about.items(), tablefmt="plain"), tabulate(tensors, headers="keys", intfmt=","), sep="\n\n")
