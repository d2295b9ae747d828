"""`paral consolidate`: from any checkpoint to one Lightning file, or to safetensors."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lightning_paral.checkpoint.consolidate import select, size_of, write_file, write_safetensors
from lightning_paral.checkpoint.finding import read_manifest, read_present
from lightning_paral.checkpoint.loading import load
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.ranks import Ranks
from lightning_paral.errors import CheckpointError, ConfigurationError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def consolidate(arguments: list[str]) -> None:
    """Write what a checkpoint holds to one file, tensor by tensor: memory does not grow with the model."""
    parser = argparse.ArgumentParser(prog="paral consolidate", description=consolidate.__doc__)
    parser.add_argument("checkpoint", help="a path or URL; a checkpoint of this package, Lightning or DeepSpeed")
    parser.add_argument("out", help="OUT.ckpt, a Lightning file, or OUT.safetensors, weights only")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; as they are saved by default")
    parser.add_argument("--max-shard-size", default="5GB", help="of each safetensors file (default: %(default)s)")
    parser.add_argument("--trust", action="store_true", help="make objects of any type; runs code that it may hold")
    options = parser.parse_args(arguments)
    as_safetensors = options.out.endswith(".safetensors")
    if not as_safetensors and not options.out.endswith(".ckpt"):
        raise ConfigurationError(f"{options.out} is neither OUT.ckpt nor OUT.safetensors.")
    if "://" in options.out:
        raise ConfigurationError(f"{options.out} is a URL. Write to a file, and copy it there.")
    out = Path(options.out)
    if os.path.isdir(out):  # not its method, which raises where it may not look
        raise ConfigurationError(f"{out} is a folder. Write to a file: {out}/NAME.ckpt, or remove the folder before.")
    max_shard_bytes = _bytes(options.max_shard_size)

    def read(here: str | Path) -> tuple[dict[str, Any], Manifest | None]:
        if out.exists() and Path(here).exists() and out.samefile(here):
            raise ConfigurationError(f"{out} is the checkpoint itself. Write to another file.")
        return load(here, Ranks(), weights_only=not options.trust), read_manifest(here)

    found, manifest = read_present(options.checkpoint, Ranks(), read)
    kept = select(found, weights_only=options.weights_only or as_safetensors, dtype=_DTYPES.get(options.dtype))
    total = size_of({"state_dict": kept["state_dict"]} if as_safetensors else kept)
    about = {
        "form": "full",
        "strategy": manifest.strategy if manifest else "unknown",
        "world_size": manifest.world_size if manifest else 0,
        "epoch": int(kept.get("epoch", 0)),
        "global_step": int(kept.get("global_step", 0)),
    }
    written = [out]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(total=total, unit="B", unit_scale=True, desc=out.name) as bar:
            if as_safetensors:
                written = write_safetensors(kept["state_dict"], out, max_shard_bytes, bar.update)
            else:
                write_file(kept, out, about, bar.update)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written, and nothing is left of it: {error}.") from error
    for path in written:
        print(path)


def _bytes(size: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    if found is None or found.group(2).upper() not in _UNITS or float(found.group(1)) == 0:
        raise ConfigurationError(f"--max-shard-size {size!r} is not a size. Write 500MB, 5GB or 2GiB.")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])
