"""`paral consolidate`: from any checkpoint to one Lightning file, or to safetensors."""

import argparse
import re
from pathlib import Path

import torch
from tqdm import tqdm

from lightning_paral.checkpoint.consolidate import select, size_of, write_file, write_safetensors
from lightning_paral.checkpoint.loading import load, read_manifest
from lightning_paral.checkpoint.ranks import Ranks
from lightning_paral.errors import ConfigurationError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def consolidate(arguments: list[str]) -> None:
    """Write what a checkpoint holds to one file, tensor by tensor: memory does not grow with the model."""
    parser = argparse.ArgumentParser(prog="paral consolidate", description=consolidate.__doc__)
    parser.add_argument("checkpoint", help="a folder or file of this package, Lightning or DeepSpeed")
    parser.add_argument("out", type=Path, help="OUT.ckpt, a Lightning file, or OUT.safetensors, weights only")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; as they are saved by default")
    parser.add_argument("--max-shard-size", default="5GB", help="of each safetensors file (default: %(default)s)")
    options = parser.parse_args(arguments)
    as_safetensors = options.out.suffix == ".safetensors"
    if not as_safetensors and options.out.suffix != ".ckpt":
        raise ConfigurationError(f"{options.out} is neither OUT.ckpt nor OUT.safetensors.")
    if options.out.exists() and options.out.samefile(options.checkpoint):
        raise ConfigurationError(f"{options.out} is the checkpoint itself. Write to another file.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(options.checkpoint)
    found = load(options.checkpoint, Ranks())
    kept = select(found, weights_only=options.weights_only or as_safetensors, dtype=_DTYPES.get(options.dtype))
    total = size_of({"state_dict": kept["state_dict"]} if as_safetensors else kept)
    with tqdm(total=total, unit="B", unit_scale=True, desc=str(options.out.name)) as bar:
        if as_safetensors:
            written = write_safetensors(kept["state_dict"], options.out, _bytes(options.max_shard_size), bar.update)
        else:
            about = {
                "form": "full",
                "strategy": manifest.strategy if manifest else "unknown",
                "world_size": manifest.world_size if manifest else 0,
                "epoch": int(kept.get("epoch", 0)),
                "global_step": int(kept.get("global_step", 0)),
            }
            write_file(kept, options.out, about, bar.update)
            written = [options.out]
    for path in written:
        print(path)


def _bytes(size: str) -> int:
    found = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", size.strip())
    if found is None or found.group(2).upper() not in _UNITS:
        raise ConfigurationError(f"--max-shard-size {size!r} is not a size. Write 500MB, 5GB or 2GiB.")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])
