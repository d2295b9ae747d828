"""Whether what all ranks hold is the same on all of them, found by checksums, before parts of it become one file."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.io.checksums import checksum
from lightning_paral.checkpoint.save_plan import TreePath, copies_in
from lightning_paral.checkpoint.shards import bytes_of, flat
from lightning_paral.distributed.agreement import RankGroup

_CHUNK = 2**22  # elements of 8 bytes; of a tensor on CUDA, as many are multiplied at a time


def find_differing(
    tree: Mapping[str, Any], ranks: RankGroup, replicated: set[int], averages_later: bool, what: str
) -> set[TreePath]:
    """Return the paths of tensors that ranks hold whole, and not alike; warn of them. *Collective*.

    Shards of which several ranks have a replica are compared, too; of those one replica is written in any case.

    Args:
        tree: what is saved.
        ranks: who saves.
        replicated: addresses of weights' storages that are to be the same on all ranks.
        averages_later: whether ranks train on their own between averagings: post-local SGD.
        what: what errors say that failed.

    Raises:
        CheckpointError: a rank could not read its tensors; on all ranks.
    """
    if ranks.world_size == 1:
        return set()
    mine: dict[Any, dict[TreePath, int]] = {}

    def sum_up() -> dict[Any, int]:
        copies = list(copies_in(tree, replicated))
        sums = _checksums([value.to_local() if isinstance(value, DTensor) else value for _, value in copies])
        for (path, value), total in zip(copies, sums, strict=True):
            mine.setdefault(_place(value), {})[path] = total
        return {place: checksum(repr(of_paths).encode()) for place, of_paths in mine.items()}

    told = ranks.agree(what, sum_up)
    if all(len({of_rank[place] for of_rank in told if place in of_rank}) == 1 for of_rank in told for place in of_rank):
        return set()
    differing: dict[TreePath, None] = {}
    all_sums: list[dict[Any, dict[TreePath, int]]] = ranks.gather(mine)
    first: dict[tuple[Any, TreePath], int] = {}
    for of_rank in all_sums:
        for place, of_paths in of_rank.items():
            for path, total in of_paths.items():
                if first.setdefault((place, path), total) != total:
                    differing[path] = None
    _warn(list(differing), averages_later)
    return set(differing)


def _warn(differing: list[TreePath], averages_later: bool) -> None:
    if not differing:
        return  # of other names; `check_same` says so
    if averages_later:
        rank_zero_warn(
            "Ranks train on their own between the averagings of post-local SGD, and this checkpoint was saved between "
            "two of them: it holds rank 0's weights and optimizer state."
        )
        return
    names = [".".join(map(str, path[1:])) for path in differing]
    rank_zero_warn(
        f"The ranks have drifted apart: {len(names)} tensors that are to be the same on all of them are not, such as "
        f"{', '.join(names[:4])}. The checkpoint holds rank 0's. Training is damaged: something changed weights or "
        "gradients on some ranks only, such as a hook with rank-dependent values, or a parameter that is not reduced."
    )


def _place(value: Tensor) -> Any:
    """Return what replicas have in common: nothing for whole tensors, the coordinate of a shard for a DTensor."""
    if not isinstance(value, DTensor):
        return None
    coordinate = value.device_mesh.get_coordinate() or ()
    return tuple(at for at, placement in zip(coordinate, value.placements, strict=False) if placement.is_shard())


def _checksums(values: list[Tensor]) -> list[int]:
    on_device = [_sum_on_device(value) for value in values if value.device.type != "cpu"]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [checksum(bytes_of(value)) if value.device.type == "cpu" else hash(tuple(next(read))) for value in values]


@torch.no_grad()
def _sum_on_device(value: Tensor) -> Tensor:
    """Return two sums over the bits of `value`, modulo 2^64, of which one heeds where they are. Nothing is copied."""
    data = flat(value).view(torch.uint8)
    whole, rest = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
    if data.storage_offset() % 8:
        whole = data[: data.numel() // 8 * 8].clone().view(torch.int64)
    plain = rest.sum(dtype=torch.int64) + whole.sum()
    weighted = torch.zeros_like(plain)
    weights = torch.arange(1, 2 * min(_CHUNK, max(1, whole.numel())), 2, device=value.device)
    for number, chunk in enumerate(torch.split(whole, _CHUNK)):
        weighted += (2 * number + 1) * (chunk * weights[: chunk.numel()]).sum()
    return torch.stack([plain, weighted])
