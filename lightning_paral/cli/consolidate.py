"""`paral consolidate`: convert any checkpoint to one Lightning file, to safetensors, or to a Hugging Face folder."""

import sys
from contextlib import redirect_stdout

import torch

from lightning_paral.checkpoint.convert import convert
from lightning_paral.cli.parser import CommandParser
from lightning_paral.quantities import parse_bytes

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
    add("--config", metavar="PATH", help="config of the PreTrainedModel, if this package did not save the checkpoint")
    add("--trust", action="store_true", help="create objects of any type; may run code in the checkpoint")
    given = vars(parser.parse_args(arguments))
    given["dtype"] = _DTYPES.get(given["dtype"])
    size = given.pop("max_shard_size")
    given["max_shard_bytes"] = None if size is None else parse_bytes(size, "--max-shard-size")
    with redirect_stdout(sys.stderr):  # transformers may import deepspeed, which prints to stdout
        written = convert(**given)
    print(*written, sep="\n")
