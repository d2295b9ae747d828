"""Compare replicas by checksums before a save, which takes the elements of a tensor from several replicas."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.checkpoint.dtensor_chunks import ranks_with_same_chunk
from lightning_paral.checkpoint.io.files import checksum
from lightning_paral.checkpoint.shards import bytes_of, flat, is_sharded
from lightning_paral.checkpoint.tree import TreePath
from lightning_paral.distributed.exchange import RankGroup

_SLICE_NUMEL = 2**22  # number of 8-byte elements that are multiplied at a time on CUDA


@dataclass(frozen=True)
class Replica:
    """This rank's replica of a tensor or of a shard. Other ranks may have the same elements."""

    path: TreePath
    stages: tuple[int, ...]
    """The pipeline stages whose ranks have the tensor, in ascending order."""
    value: Tensor
    """The full tensor, or a `DTensor` or `FlatShard` of its shape."""

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks have the same elements."""
        if isinstance(self.value, DTensor):
            return len(ranks_with_same_chunk(self.value)) > 1
        return not is_sharded(self.value)

    @property
    def group(self) -> Any:
        """A key that is equal on all ranks with the same elements. For a DTensor, it contains these ranks."""
        ranks = ranks_with_same_chunk(self.value) if isinstance(self.value, DTensor) else None
        return self.stages, ranks


def find_differing(replicas: list[Replica], ranks: RankGroup, averages_later: bool, what: str) -> set[TreePath]:
    """Return the paths of tensors whose replicas differ, and warn about them. *Collective* over `ranks`.

    Ranks exchange one checksum per group of ranks with the same elements. Only if these differ, they exchange one per
    tensor.

    Args:
        replicas: the tensors of this rank. Those that only this rank has are skipped.
        ranks: the ranks that save together.
        averages_later: whether replicas may differ because the weights are averaged only from time to time, as in
            post-local SGD.
        what: the action, such as "Saving a.ckpt", for error messages.

    Raises:
        CheckpointError: a rank could not read its tensors. Raised on all ranks.
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
        return {group: checksum(repr(sums_by_path).encode()) for group, sums_by_path in local.items()}

    first: dict[Any, int] = {}
    digests = ranks.gather_results(what, compute_digests)
    if all(first.setdefault(group, digest) == digest for by_group in digests for group, digest in by_group.items()):
        return set()
    first_sums: dict[tuple[Any, TreePath], int] = {}
    differing: dict[TreePath, None] = {}
    for by_group in ranks.gather(local):
        for group, sums_by_path in by_group.items():
            for path, total in sums_by_path.items():
                if first_sums.setdefault((group, path), total) != total:
                    differing[path] = None
    _warn(list(differing), averages_later)
    return set(differing)


def _warn(differing: list[TreePath], averages_later: bool) -> None:
    if averages_later:
        rank_zero_warn(
            "Under post-local SGD, ranks train independently until their weights are averaged. This checkpoint was "
            "saved between two averagings, so it contains the weights and optimizer state of rank 0."
        )
        return
    names = [".".join(map(str, path[1:])) for path in differing]
    rank_zero_warn(
        f"The ranks have drifted apart: {len(names)} tensors that should be equal on all ranks differ, such as "
        f"{', '.join(names[:4])}. The checkpoint contains the values of rank 0. The training is not correct: something "
        "changed weights or gradients only on some ranks, such as a hook with rank-dependent values, or a parameter "
        "whose gradient is not reduced."
    )


def _checksums(values: list[Tensor]) -> list[int]:
    on_device = [_sum_on_device(value) for value in values if value.device.type != "cpu"]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [checksum(bytes_of(value)) if value.device.type == "cpu" else hash(tuple(next(read))) for value in values]


@torch.no_grad()
def _sum_on_device(value: Tensor) -> Tensor:
    """Return two sums over the 64-bit words of `value`, modulo 2^64: a plain one, and one weighted by position."""
    data = flat(value).view(torch.uint8)
    words, rest = data[: data.numel() // 8 * 8], data[data.numel() // 8 * 8 :]
    words = (words.clone() if data.storage_offset() % 8 else words).view(torch.int64)  # the view requires alignment
    plain = rest.sum(dtype=torch.int64) + words.sum()
    weighted = torch.zeros_like(plain)
    weights = torch.arange(1, 2 * min(_SLICE_NUMEL, max(1, words.numel())), 2, device=value.device)
    for number, part in enumerate(torch.split(words, _SLICE_NUMEL)):
        weighted += (2 * number + 1) * (part * weights[: part.numel()]).sum()
    return torch.stack([plain, weighted])
