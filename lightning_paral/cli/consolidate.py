"""`paral consolidate`: convert any checkpoint to one Lightning file, to safetensors, or to a Hugging Face folder."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lightning_paral.checkpoint.consolidate import Cast, check_outside, select, size_of, write_file
from lightning_paral.checkpoint.formats.hugging_face_folder import contents_of, write_folder
from lightning_paral.checkpoint.formats.safetensors import write_safetensors
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.resolve import read_current, read_manifest
from lightning_paral.checkpoint.state.prefix import as_prefix, without_prefix
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError, ConfigurationError
from lightning_paral.quantities import parse_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def consolidate(arguments: list[str]) -> None:
    """Convert a checkpoint to one Lightning file, safetensors or a Hugging Face folder, in constant memory."""
    options = _parser().parse_args(arguments)
    out = _parse_out(options)
    max_shard_bytes = parse_bytes(options.max_shard_size, "--max-shard-size")
    as_checkpoint = not options.hugging_face and out.suffix == ".ckpt"

    def read(path: str | Path) -> tuple[dict[str, Any], Manifest | None]:
        if out.exists() and Path(path).exists() and out.samefile(path):
            raise ConfigurationError(f"{out} is the checkpoint that is read. Write to a different path.")
        check_outside(out, path)
        return load(path, RankGroup(), weights_only=not options.trust), read_manifest(path)

    found, manifest = read_current(options.checkpoint, RankGroup(), read)
    kept = select(found, weights_only=options.weights_only or not as_checkpoint, dtype=_DTYPES.get(options.dtype))
    prefix = None if options.strip_prefix is None else as_prefix(options.strip_prefix)
    writer = _Writer(out, max_shard_bytes)
    if as_checkpoint:
        written = writer.write_lightning_file(kept, manifest)
    elif options.hugging_face:
        written = writer.write_hugging_face_folder(kept, options, prefix)
    else:
        if prefix is not None:
            kept["state_dict"] = without_prefix(kept["state_dict"], prefix, only=options.only_prefix)
        written = writer.write_safetensors(kept["state_dict"])
    for path in written:
        print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paral consolidate", description=consolidate.__doc__)
    parser.add_argument("checkpoint", help="path or URL of a checkpoint of this package, Lightning or DeepSpeed")
    parser.add_argument(
        "out", help="OUT.ckpt: a Lightning file; OUT.safetensors: weights only; with --hugging-face, a folder"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: as saved)")
    parser.add_argument(
        "--max-shard-size", default="5GB", help="maximum size of a safetensors file (default: %(default)s)"
    )
    parser.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        help="prefix to remove from the names of weights in safetensors, such as `model.` for `self.model`",
    )
    parser.add_argument("--only-prefix", action="store_true", help="leave out weights whose names lack the prefix")
    parser.add_argument(
        "--hugging-face",
        action="store_true",
        help="write the PreTrainedModel as a folder that from_pretrained loads",
    )
    parser.add_argument(
        "--config",
        metavar="FOLDER_OR_FILE",
        help="configuration of the PreTrainedModel, required for checkpoints that this package did not save",
    )
    parser.add_argument(
        "--trust", action="store_true", help="create objects of any type, which may run code in the checkpoint"
    )
    return parser


def _parse_out(options: argparse.Namespace) -> Path:
    """Return the output path.

    Raises:
        ConfigurationError: the options contradict each other or the path, or a folder at the path would have to be
            replaced.
    """
    if "://" in options.out:
        raise ConfigurationError(f"{options.out} is a URL. Write to a local path, and copy the result to the URL.")
    out = Path(options.out)
    if options.hugging_face:
        if out.suffix in (".ckpt", ".safetensors"):
            raise ConfigurationError(f"--hugging-face writes a folder, but {out} is the name of a file.")
        if os.path.lexists(out) and not _is_empty_folder(out):
            raise ConfigurationError(f"{out} exists and is not an empty folder. Write to a new folder.")
        return out
    if options.config is not None:
        raise ConfigurationError("--config needs --hugging-face.")
    if out.suffix not in (".ckpt", ".safetensors"):
        raise ConfigurationError(f"{out} ends in neither .ckpt nor .safetensors. A folder needs --hugging-face.")
    if options.strip_prefix is not None and out.suffix == ".ckpt":
        raise ConfigurationError("--strip-prefix needs safetensors: a Lightning file keeps the names of the module.")
    if options.only_prefix and options.strip_prefix is None:
        raise ConfigurationError("--only-prefix needs --strip-prefix.")
    if os.path.isdir(out):  # Path.is_dir raises PermissionError where this returns False
        raise ConfigurationError(f"{out} is a folder. Write to a file: {out}/NAME.ckpt, or remove the folder first.")
    return out


def _is_empty_folder(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and not os.listdir(path)
    return False


class _Writer:
    """Writes the output, in one of three formats, and shows a progress bar."""

    def __init__(self, out: Path, max_shard_bytes: int) -> None:
        self._out = out
        self._max_shard_bytes = max_shard_bytes

    def _run_with_progress(self, total: int, write: Any) -> Any:
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with tqdm(total=total, unit="B", unit_scale=True, desc=self._out.name) as bar:
                return write(bar.update)
        except OSError as error:
            raise CheckpointError(f"{self._out} could not be written: {error}. No part of it was kept.") from error

    def write_lightning_file(self, kept: dict[str, Any], manifest: Manifest | None) -> list[Path]:
        about = {
            "form": "full",
            "strategy": manifest.strategy if manifest else "unknown",
            "world_size": manifest.world_size if manifest else 0,
            "epoch": int(kept.get("epoch", 0)),
            "global_step": int(kept.get("global_step", 0)),
        }
        self._run_with_progress(size_of(kept), lambda progress: write_file(kept, self._out, about, progress))
        return [self._out]

    def write_safetensors(self, weights: dict[str, Any]) -> list[Path]:
        _report_omitted(weights)
        written: list[Path] = self._run_with_progress(
            size_of({"state_dict": weights}),
            lambda progress: write_safetensors(weights, self._out, self._max_shard_bytes, progress),
        )
        return written

    def write_hugging_face_folder(
        self, kept: dict[str, Any], options: argparse.Namespace, prefix: str | None
    ) -> list[Path]:
        config = None if options.config is None else Path(options.config)
        contents = contents_of(
            kept, config=config, prefix=prefix, only_prefix=options.only_prefix, cast=options.dtype is not None
        )
        if not contents.checked:
            print(
                "The names of the weights were not checked: `transformers` is not installed, or does not have the "
                "model's class.",
                file=sys.stderr,
            )
        _report_omitted(kept["state_dict"])
        written: list[Path] = self._run_with_progress(
            contents.nbytes, lambda progress: write_folder(contents, self._out, self._max_shard_bytes, progress)
        )
        return written


def _report_omitted(weights: dict[str, Any]) -> None:
    names = [name for name, value in weights.items() if not isinstance(value, torch.Tensor | Cast)]
    if names:
        print(f"Left out, because safetensors files hold only tensors: {', '.join(names)}.", file=sys.stderr)
