"""`paral consolidate`: from any checkpoint to one Lightning file, to safetensors, or to a Hugging Face model."""

import argparse
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lightning_paral.checkpoint.consolidate import Cast, select, size_of, write_file
from lightning_paral.checkpoint.formats.hugging_face_folder import contents_of, write_folder
from lightning_paral.checkpoint.formats.safetensors import write_safetensors
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.output_path import check_outside
from lightning_paral.checkpoint.resolve import read_manifest, read_present
from lightning_paral.checkpoint.state.prefix import as_prefix, without_prefix
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError, ConfigurationError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def consolidate(arguments: list[str]) -> None:
    """Write what a checkpoint holds to one file, tensor by tensor: memory does not grow with the model."""
    options = _parser().parse_args(arguments)
    out = _checked_out(options)
    max_shard_bytes = _bytes(options.max_shard_size)
    as_checkpoint = not options.hugging_face and out.suffix == ".ckpt"

    def read(here: str | Path) -> tuple[dict[str, Any], Manifest | None]:
        if out.exists() and Path(here).exists() and out.samefile(here):
            raise ConfigurationError(f"{out} is the checkpoint itself. Write elsewhere.")
        check_outside(out, here)
        return load(here, RankGroup(), weights_only=not options.trust), read_manifest(here)

    found, manifest = read_present(options.checkpoint, RankGroup(), read)
    kept = select(found, weights_only=options.weights_only or not as_checkpoint, dtype=_DTYPES.get(options.dtype))
    prefix = None if options.strip_prefix is None else as_prefix(options.strip_prefix)
    write = _Writer(out, max_shard_bytes)
    if as_checkpoint:
        written = write.lightning_file(kept, manifest)
    elif options.hugging_face:
        written = write.hugging_face_folder(kept, options, prefix)
    else:
        if prefix is not None:
            kept["state_dict"] = without_prefix(kept["state_dict"], prefix, only=options.only_prefix)
        written = write.safetensors(kept["state_dict"])
    for path in written:
        print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paral consolidate", description=consolidate.__doc__)
    parser.add_argument("checkpoint", help="a path or URL; a checkpoint of this package, Lightning or DeepSpeed")
    parser.add_argument("out", help="OUT.ckpt, a Lightning file; OUT.safetensors, weights only; or a new folder")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; as they are saved by default")
    parser.add_argument("--max-shard-size", default="5GB", help="of each safetensors file (default: %(default)s)")
    parser.add_argument(
        "--strip-prefix", metavar="PREFIX", help="of the weights' names in safetensors: `model.` for `self.model`"
    )
    parser.add_argument("--only-prefix", action="store_true", help="leave out weights without the prefix")
    parser.add_argument(
        "--hugging-face", action="store_true", help="write the module's PreTrainedModel as a folder for from_pretrained"
    )
    parser.add_argument(
        "--config",
        metavar="FOLDER_OR_FILE",
        help="of the PreTrainedModel; needed for checkpoints that no strategy of this package has saved",
    )
    parser.add_argument("--trust", action="store_true", help="make objects of any type; runs code that it may hold")
    return parser


def _checked_out(options: argparse.Namespace) -> Path:
    """Return where to write, if that fits the options.

    Raises:
        ConfigurationError: it does not.
    """
    if "://" in options.out:
        raise ConfigurationError(f"{options.out} is a URL. Write to a file, and copy it there.")
    out = Path(options.out)
    if options.hugging_face:
        if out.suffix in (".ckpt", ".safetensors"):
            raise ConfigurationError(f"--hugging-face writes a folder, and {out} is the name of a file.")
        if os.path.lexists(out) and not _is_empty_folder(out):
            raise ConfigurationError(f"{out} is there, and no empty folder: it is not replaced. Write to a new folder.")
        return out
    if options.config is not None:
        raise ConfigurationError("--config is for --hugging-face, which writes a folder.")
    if out.suffix not in (".ckpt", ".safetensors"):
        raise ConfigurationError(f"{out} is neither OUT.ckpt nor OUT.safetensors. A folder needs --hugging-face.")
    if options.strip_prefix is not None and out.suffix == ".ckpt":
        raise ConfigurationError("--strip-prefix is for safetensors: a Lightning file has the names of its module.")
    if options.only_prefix and options.strip_prefix is None:
        raise ConfigurationError("--only-prefix needs a --strip-prefix.")
    if os.path.isdir(out):  # not its method, which raises where it may not look
        raise ConfigurationError(f"{out} is a folder. Write to a file: {out}/NAME.ckpt, or remove the folder before.")
    return out


def _is_empty_folder(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and not os.listdir(path)
    return False


class _Writer:
    """Writes one output, with a bar."""

    def __init__(self, out: Path, max_shard_bytes: int) -> None:
        self._out = out
        self._max_shard_bytes = max_shard_bytes

    def _run(self, total: int, write: Any) -> Any:
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with tqdm(total=total, unit="B", unit_scale=True, desc=self._out.name) as bar:
                return write(bar.update)
        except OSError as error:
            raise CheckpointError(f"{self._out} could not be written, and nothing is left of it: {error}.") from error

    def lightning_file(self, kept: dict[str, Any], manifest: Manifest | None) -> list[Path]:
        about = {
            "form": "full",
            "strategy": manifest.strategy if manifest else "unknown",
            "world_size": manifest.world_size if manifest else 0,
            "epoch": int(kept.get("epoch", 0)),
            "global_step": int(kept.get("global_step", 0)),
        }
        self._run(size_of(kept), lambda progress: write_file(kept, self._out, about, progress))
        return [self._out]

    def safetensors(self, weights: dict[str, Any]) -> list[Path]:
        _report_what_is_left_out(weights)
        written: list[Path] = self._run(
            size_of({"state_dict": weights}),
            lambda progress: write_safetensors(weights, self._out, self._max_shard_bytes, progress),
        )
        return written

    def hugging_face_folder(self, kept: dict[str, Any], options: argparse.Namespace, prefix: str | None) -> list[Path]:
        config = None if options.config is None else Path(options.config)
        contents = contents_of(
            kept, config=config, prefix=prefix, only_prefix=options.only_prefix, cast=options.dtype is not None
        )
        if not contents.checked:
            print(
                "The weights' names were not compared with what `transformers` expects: it is not installed, or does "
                "not have the model's class.",
                file=sys.stderr,
            )
        _report_what_is_left_out(kept["state_dict"])
        written: list[Path] = self._run(
            contents.nbytes, lambda progress: write_folder(contents, self._out, self._max_shard_bytes, progress)
        )
        return written


def _report_what_is_left_out(weights: dict[str, Any]) -> None:
    names = [name for name, value in weights.items() if not isinstance(value, torch.Tensor | Cast)]
    if names:
        print(f"Left out, as safetensors holds tensors only: {', '.join(names)}.", file=sys.stderr)


def _bytes(size: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    if found is None or found.group(2).upper() not in _UNITS or float(found.group(1)) == 0:
        raise ConfigurationError(f"--max-shard-size {size!r} is not a size. Write 500MB, 5GB or 2GiB.")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])
