"""Weights from the folders that Lightning's `deepspeed` strategies save, of any stage and number of ranks."""

import re
from math import ceil, prod
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.geometry import boxes_of_run
from lightning_paral.checkpoint.stored import StoredPiece, StoredTensor
from lightning_paral.checkpoint.unpickle import load_safely
from lightning_paral.errors import CheckpointError

_OF_DEEPSPEED = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
}  # fmt: skip
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00")


def find_folder(path: Path) -> Path | None:
    """Return the folder with the ranks' files if `path` is a DeepSpeed checkpoint, else `None`."""
    latest = path / "latest"
    tag = latest.read_text().strip() if latest.is_file() else "checkpoint"
    folder = path / tag
    return folder if any(folder.glob("*mp_rank_00_model_states.pt")) else None


def read_deepspeed(folder: Path, weights_only: bool) -> dict[str, Any]:
    """Return weights and what else Lightning saved. Optimizer states are left out: they are DeepSpeed's own.

    Raises:
        CheckpointError: files of ranks are missing, or hold code.
    """
    if (folder / "mp_rank_00_model_states.pt").is_file():
        states = _load(folder / "mp_rank_00_model_states.pt", weights_only)
        weights = states["module"]
    else:
        states, weights = _read_stage3(folder, weights_only)
    checkpoint = {key: value for key, value in states.items() if key not in _OF_DEEPSPEED}
    return checkpoint | {"state_dict": weights}


def _read_stage3(folder: Path, weights_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    models = _by_rank(folder, "model_states", weights_only)
    optimizers = _by_rank(folder, "optim_states", weights_only)
    if len(models) != len(optimizers) or not models:
        raise CheckpointError(
            f"{folder} has model states of {len(models)} ranks and optimizer states of {len(optimizers)}."
        )
    flats: list[list[Tensor]] = [states["optimizer_state_dict"]["fp32_flat_groups"] for states in optimizers]
    weights: dict[str, Any] = {}
    for group, shapes in enumerate(models[0]["param_shapes"]):
        position = 0
        for name, shape in shapes.items():
            share = ceil(prod(shape) / len(flats))
            runs = [flat[group][position : position + share] for flat in flats]
            weights[name] = _of_runs(tuple(shape), runs, share)
            position += share
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        runs = [states["frozen_param_fragments"][name] for states in models]
        weights[name] = _of_runs(tuple(shape), runs, ceil(prod(shape) / len(runs)))
    buffers = models[0].get("buffer_names") or ()
    weights |= {name: value for name, value in models[0]["module"].items() if name in buffers}
    for name, same in dict(models[0].get("shared_params") or {}).items():
        if same in weights:
            weights[name] = weights[same]
    return models[0], weights


def _of_runs(shape: tuple[int, ...], runs: list[Tensor], share: int) -> Tensor:
    pieces = []
    for rank, run in enumerate(runs):
        start = min(prod(shape), rank * share)
        position = 0
        for box in boxes_of_run(shape, start, min(prod(shape), start + share)):
            values = run.view(-1)[position : position + box.numel].view(box.sizes)
            pieces.append(StoredPiece(box, lambda values=values: values))  # type: ignore[misc]
            position += box.numel
    return StoredTensor(shape, runs[0].dtype, pieces)


def _by_rank(folder: Path, kind: str, weights_only: bool) -> list[dict[str, Any]]:
    found = {}
    for path in folder.glob(f"*zero_pp_rank_*_mp_rank_00_{kind}.pt"):
        match = _RANK.search(path.name)
        assert match is not None
        found[int(match.group(1))] = path
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} has {kind} of ranks {sorted(found)} only: files are missing.")
    return [_load(found[rank], weights_only) for rank in range(len(found))]


def _load(path: Path, weights_only: bool) -> dict[str, Any]:
    return dict(load_safely(path, weights_only=weights_only, mmap=True, extra=_harmless()))


def _harmless() -> tuple[Any, ...]:
    """Return types of DeepSpeed that its checkpoints hold and that only carry data."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError:
        return ()
    return (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
