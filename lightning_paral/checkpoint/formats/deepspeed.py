"""Read weights from folders saved by Lightning's `deepspeed` strategies, at any stage and with any number of ranks."""

import re
from collections.abc import Mapping
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.io.storage import LocalStorage
from lightning_paral.checkpoint.layout import chunks_of_flat_range
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, StoredChunk
from lightning_paral.checkpoint.resolve import explain_read_errors
from lightning_paral.checkpoint.safe_load.unpickle import load_safely
from lightning_paral.checkpoint.shards import identity
from lightning_paral.errors import CheckpointError

_DEEPSPEED_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions",
}  # fmt: skip
"""Keys that DeepSpeed adds to the entries of Lightning's checkpoint."""
_RANK = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_00", re.ASCII)
_MAX_TAG_BYTES = 4096


def find_folder(path: Path) -> Path | None:
    """Return the folder with the ranks' files if `path` is a DeepSpeed checkpoint; otherwise `None`.

    Raises:
        CheckpointError: the name of that folder is invalid, or leads out of `path`.
    """
    root = LocalStorage(path)
    size = root.size("latest")
    tag = "checkpoint"
    if size is not None:
        if size > _MAX_TAG_BYTES:
            return None
        tag = bytes(root.read("latest", 0, size)).decode(errors="replace").strip()
        if not tag or "\n" in tag:
            return None
    if not root.is_folder(tag):
        return None
    return path / tag if any((path / tag).glob("*mp_rank_00_model_states.pt")) else None


def read_deepspeed(folder: Path, weights_only: bool) -> dict[str, Any]:
    """Return the checkpoint in Lightning's format. Weights that have an fp32 master copy are returned in fp32.

    Optimizer states are left out, because their format is specific to DeepSpeed.

    Args:
        folder: the folder with the ranks' files, see `find_folder`.
        weights_only: `False` trusts the checkpoint and runs code in it.

    Raises:
        CheckpointError: files are missing or damaged, or contain code and `weights_only` is `True`.
    """
    with explain_read_errors(folder):
        return _read(folder, weights_only)


def _read(folder: Path, weights_only: bool) -> dict[str, Any]:
    if (folder / "mp_rank_00_model_states.pt").is_file():
        states = _load(folder / "mp_rank_00_model_states.pt", weights_only)
        weights = states["module"] | _read_stage1_masters(folder, states, weights_only)
    else:
        states, weights = _read_stage3(folder, weights_only)
    for name, source in dict(states.get("shared_params") or {}).items():
        if source in weights:
            weights[name] = weights[source]
    checkpoint = {key: value for key, value in states.items() if key not in _DEEPSPEED_KEYS}
    return checkpoint | {"state_dict": weights}


def _read_stage1_masters(folder: Path, states: dict[str, Any], weights_only: bool) -> dict[str, Tensor]:
    """Return the fp32 master weights of stage 1 or 2; an empty dict if the parameters are fp32, or if none were saved.

    DeepSpeed flattens the parameters of a group into one vector, and each rank has a flat range of it. Follows
    DeepSpeed's `zero_to_fp32`.
    """
    groups = states.get("param_shapes") or []
    if all(states["module"][name].dtype == torch.float32 for shapes in groups for name in shapes):
        return {}
    optimizers = _load_optimizers_by_rank(folder, weights_only)
    if not optimizers or "single_partition_of_fp32_groups" not in optimizers[0]:
        return {}
    weights = {}
    for group, shapes in enumerate(groups):
        flats = [optimizer["single_partition_of_fp32_groups"][group].view(-1) for optimizer in optimizers]
        paddings = (optimizers[0].get("param_alignment_paddings") or {group: [0] * len(shapes)})[group]
        position = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            numel, start, ranges = prod(shape), 0, []
            for flat in flats:
                first, last = max(position, start), min(position + numel, start + flat.numel())
                if first < last:
                    ranges.append((first - position, flat[first - start : last - start]))
                start += flat.numel()
            weights[name] = _from_flat_ranges(folder, name, tuple(shape), ranges)
            position += numel + padding
    return weights


def _read_stage3(folder: Path, weights_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that rank 0 saved, and the weights of stage 3, each sharded evenly over the ranks."""
    models = _load_by_rank(folder, "model_states", weights_only)
    optimizers = _load_optimizers_by_rank(folder, weights_only)
    if len(models) != len(optimizers):
        raise CheckpointError(
            f"{folder} has the model states of {len(models)} ranks, but the optimizer states of {len(optimizers)}. "
            "Files are missing."
        )
    weights: dict[str, Any] = {}
    for group, shapes in enumerate(models[0]["param_shapes"]):
        flats = [optimizer["fp32_flat_groups"][group] for optimizer in optimizers]
        position = 0
        for name, shape in shapes.items():
            numel = ceil(prod(shape) / len(flats))
            shards = [flat[position : position + numel] for flat in flats]
            weights[name] = _from_padded_shards(folder, name, tuple(shape), shards, numel)
            position += numel
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        shards = [states["frozen_param_fragments"][name] for states in models]
        weights[name] = _from_padded_shards(folder, name, tuple(shape), shards, ceil(prod(shape) / len(shards)))
    buffers = models[0].get("buffer_names") or ()
    weights |= {name: value for name, value in models[0]["module"].items() if name in buffers}
    return models[0], weights


def _from_padded_shards(
    folder: Path, name: str, shape: tuple[int, ...], shards: list[Tensor], shard_numel: int
) -> Tensor:
    """Return a tensor from flat shards of `shard_numel` elements each, with padding at the end."""
    starts = [min(prod(shape), rank * shard_numel) for rank in range(len(shards))]
    ranges = [(start, shard.view(-1)[: prod(shape) - start]) for start, shard in zip(starts, shards, strict=True)]
    return _from_flat_ranges(folder, name, shape, ranges)


def _from_flat_ranges(folder: Path, name: str, shape: tuple[int, ...], ranges: list[tuple[int, Tensor]]) -> Tensor:
    """Return a tensor from flat ranges, each given as the index of its first element and its values."""
    found = sum(values.numel() for _, values in ranges)
    if found != prod(shape):
        raise CheckpointError(
            f"{folder} has {found} of the {prod(shape)} elements of {name}. DeepSpeed saves tensors that are "
            "offloaded to NVMe as copies of its swap files, which cannot be read. Save without NVMe offload, or under "
            "paral_zero3_nvme."
        )
    chunks = []
    for start, values in ranges:
        position = 0
        for chunk in chunks_of_flat_range(shape, start, start + values.numel()):
            found_values = values[position : position + chunk.numel].view(chunk.sizes)
            chunks.append(StoredChunk(chunk, partial(identity, found_values)))
            position += chunk.numel
    return LazyTensor(shape, ranges[0][1].dtype, chunks)


def _load_optimizers_by_rank(folder: Path, weights_only: bool) -> list[dict[str, Any]]:
    optimizers = [states["optimizer_state_dict"] for states in _load_by_rank(folder, "optim_states", weights_only)]
    counts = optimizers[0].get("partition_count", len(optimizers)) if optimizers else 0
    count = max(counts) if isinstance(counts, list) else counts
    if count != len(optimizers):
        raise CheckpointError(
            f"{folder} has the optimizer states of {len(optimizers)} of {count} ranks. Files are missing."
        )
    return optimizers


def _load_by_rank(folder: Path, kind: str, weights_only: bool) -> list[dict[str, Any]]:
    found = {}
    for path in folder.glob(f"*zero_pp_rank_*_mp_rank_00_{kind}.pt"):
        match = _RANK.search(path.name)
        if match is None:
            raise CheckpointError(f"The name of {path} does not contain a valid rank.")
        found[int(match.group(1))] = path
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} has only the {kind} of ranks {sorted(found)}. Files are missing.")
    return [_load(found[rank], weights_only) for rank in range(len(found))]


def _load(path: Path, weights_only: bool) -> dict[str, Any]:
    if LocalStorage(path.parent).size(path.name) is None:
        raise CheckpointError(f"{path} is missing.")
    found = load_safely(path, weights_only=weights_only, mmap=True, extra=_deepspeed_data_types())
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} contains a {type(found).__name__}, not the states of a rank.")
    return dict(found)


def _deepspeed_data_types() -> tuple[Any, ...]:
    """Return the DeepSpeed types that occur in its checkpoints and only carry data."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError:
        return ()
    return (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
