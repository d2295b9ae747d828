"""Compare replicas by checksums before a save takes elements of one tensor from several of them."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.io.files import checksum
from lightning_paral.checkpoint.shards import bytes_of, flat, is_sharded
from lightning_paral.checkpoint.tree import TreePath
from lightning_paral.distributed.agreement import RankGroup

_SLICE_NUMEL = 2**22  # elements of 8 bytes that are multiplied at a time on CUDA


@dataclass(frozen=True)
class Replica:
    """This rank's value of a tensor that other ranks hold, too: the full tensor, or a shard with replicas."""

    path: TreePath
    stages: tuple[int, ...]
    """The pipeline stages whose ranks hold the tensor."""
    value: Tensor

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks hold the same elements."""
        if isinstance(self.value, DTensor):
            return any(placement.is_replicate() for placement in self.value.placements)
        return not is_sharded(self.value)

    @property
    def group(self) -> Any:
        """A key that the ranks share that hold the same elements: of a DTensor, the coordinate of its shard."""
        if not isinstance(self.value, DTensor):
            return self.stages, None
        coordinate = self.value.device_mesh.get_coordinate() or ()
        sharded = zip(coordinate, self.value.placements, strict=False)
        return self.stages, tuple(index for index, placement in sharded if placement.is_shard())


def find_differing(replicas: list[Replica], ranks: RankGroup, averages_later: bool, what: str) -> set[TreePath]:
    """Return the paths of tensors whose replicas differ between ranks, and warn of them. *Collective*.

    Ranks exchange one checksum per group of replicas; only if these differ, one per tensor.

    Args:
        replicas: the tensors of this rank; those without other replicas are skipped.
        ranks: the ranks that save together.
        averages_later: whether the ranks train apart and average their weights from time to time: post-local SGD.
        what: what failed, for errors.

    Raises:
        CheckpointError: a rank could not read its tensors; on all ranks.
    """
    if ranks.world_size == 1:
        return set()
    local: dict[Any, dict[TreePath, int]] = {}

    def compute_digests() -> dict[Any, int]:
        compared = [replica for replica in replicas if replica.has_replicas]
        values = [replica.value for replica in compared]
        sums = _checksums([value.to_local() if isinstance(value, DTensor) else value for value in values])
        for replica, total in zip(compared, sums, strict=True):
            local.setdefault(replica.group, {})[replica.path] = total
        return {group: checksum(repr(of_paths).encode()) for group, of_paths in local.items()}

    first: dict[Any, int] = {}
    digests = ranks.gather_results(what, compute_digests)
    if all(first.setdefault(group, digest) == digest for of_rank in digests for group, digest in of_rank.items()):
        return set()
    first_sums: dict[tuple[Any, TreePath], int] = {}
    differing: dict[TreePath, None] = {}
    for of_rank in ranks.gather(local):
        for group, of_paths in of_rank.items():
            for path, total in of_paths.items():
                if first_sums.setdefault((group, path), total) != total:
                    differing[path] = None
    _warn(list(differing), averages_later)
    return set(differing)


def _warn(differing: list[TreePath], averages_later: bool) -> None:
    if averages_later:
        rank_zero_warn(
            "Ranks train on their own between the averagings of post-local SGD, and this checkpoint was saved between "
            "two of them: it holds rank 0's weights and optimizer state."
        )
        return
    names = [".".join(map(str, path[1:])) for path in differing]
    rank_zero_warn(
        f"The ranks have drifted apart: {len(names)} tensors that should be the same on all ranks differ, such as "
        f"{', '.join(names[:4])}. The checkpoint holds rank 0's. Training is damaged: something changed weights or "
        "gradients on some ranks only, such as a hook with rank-dependent values, or a parameter that is not reduced."
    )


def _checksums(values: list[Tensor]) -> list[int]:
    on_device = [_sum_on_device(value) for value in values if value.device.type != "cpu"]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [checksum(bytes_of(value)) if value.device.type == "cpu" else hash(tuple(next(read))) for value in values]


@torch.no_grad()
def _sum_on_device(value: Tensor) -> Tensor:
    """Return two sums over the bits of `value`, modulo 2^64, one of them weighted by position. Nothing is copied."""
    data = flat(value).view(torch.uint8)
    words, rest = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
    if data.storage_offset() % 8:
        words = data[: data.numel() // 8 * 8].clone().view(torch.int64)
    plain = rest.sum(dtype=torch.int64) + words.sum()
    weighted = torch.zeros_like(plain)
    weights = torch.arange(1, 2 * min(_SLICE_NUMEL, max(1, words.numel())), 2, device=value.device)
    for number, part in enumerate(torch.split(words, _SLICE_NUMEL)):
        weighted += (2 * number + 1) * (part * weights[: part.numel()]).sum()
    return torch.stack([plain, weighted])
