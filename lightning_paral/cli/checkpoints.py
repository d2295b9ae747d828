"""`paral consolidate`, `paral verify` and `paral inspect`: convert, check and print checkpoints."""

import json
import sys
from contextlib import redirect_stdout
from typing import Any

import torch
from tabulate import tabulate

from lightning_paral.checkpoint.convert import convert
from lightning_paral.checkpoint.load import check, named_tensors, peek
from lightning_paral.cli.parser import CommandParser
from lightning_paral.text import parse_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def consolidate(arguments: list[str]) -> None:
    """Convert a checkpoint to one Lightning file, safetensors or a Hugging Face folder, tensor by tensor."""
    parser = CommandParser(prog="paral consolidate", description=consolidate.__doc__)
    add = parser.add_argument
    add("checkpoint", help="path or URL of a checkpoint of this package or Lightning")
    add("out", help="OUT.ckpt: a Lightning file; OUT.safetensors: weights only; with --hugging-face, a folder")
    add("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    add("--dtype", choices=_DTYPES, help="dtype of the weights (default: as saved)")
    add("--max-shard-size", help="maximum size of a file in a Hugging Face folder (default: 5GB)")
    add("--strip-prefix", metavar="PREFIX", help="remove it from names in safetensors: `model.` for `self.model`")
    add("--only-prefix", action="store_true", help="leave out weights whose names lack the prefix")
    add("--hugging-face", action="store_true", help="write the PreTrainedModel in a folder for from_pretrained")
    add("--trust", action="store_true", help="create objects of any type; may run code in the checkpoint")
    given = vars(parser.parse_args(arguments))
    given["dtype"] = _DTYPES.get(given["dtype"])
    size = given.pop("max_shard_size")
    given["max_shard_bytes"] = None if size is None else parse_bytes(size, "--max-shard-size")
    with redirect_stdout(sys.stderr):  # transformers may import deepspeed, which prints to stdout
        written = convert(**given)
    print(*written, sep="\n")


def verify(arguments: list[str]) -> None:
    """Check the sizes and checksums of a checkpoint's files, and that its chunks cover each tensor exactly once."""
    parser = CommandParser(prog="paral verify", description=verify.__doc__)
    parser.add_argument("checkpoint", help="path or URL")
    parser.add_argument("--trust", action="store_true", help="create objects of any type; may run code in it")
    options = parser.parse_args(arguments)
    path = options.checkpoint
    manifest, faults = check(path, weights_only=not options.trust)
    if faults:
        sys.exit("\n".join(f"paral: {fault}" for fault in faults))
    if manifest is None:
        print(f"{path}: is readable, and its tensors are complete. It has no manifest, so no checksums were compared.")
    else:
        size_bytes = sum(record.bytes for record in manifest.files.values())
        print(f"{path}: complete and undamaged, {len(manifest.files)} files, {size_bytes:,} bytes.")


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
