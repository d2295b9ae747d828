"""Check at the end of an epoch that all ranks are about to reduce the same logged values, in the same order."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric

from lightning_paral.compat.lightning.results import ResultMetric
from lightning_paral.data.logged_steps import EVERY_RANK
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

_EVERY_METRIC = (
    "If one rank logs a metric that is synchronized, every rank must log it, in the same order, also with "
    "rank_zero_only=True. If each rank computes a value of its own, create the metric with sync_on_compute=False."
)
_METRIC = "the metric "


def check_same_keys(results: Iterable[tuple[str, ResultMetric]], dims: ParallelDims) -> None:
    """Check that all data ranks are about to reduce the same values. *Collective* over the data ranks.

    Args:
        results: the keys and values that this rank has logged, in order.
        dims: the parallel dimensions.

    Raises:
        ConfigurationError: the keys differ. The message names keys and ranks.
    """
    ours = [
        f"{'' if result.is_tensor else _METRIC}{key!r}"
        for key, result in results
        if result.meta.on_epoch and _is_reduced(result, dims)
    ]
    gather = dims.data_rank_group().gather
    if len(set(gather(zlib.crc32(repr(ours).encode())))) > 1:
        raise _error(dict(zip(dims.data_ranks, gather(ours), strict=True)))


def synchronizes(metric: Metric, dims: ParallelDims) -> bool:
    """Return whether `compute` of `metric` is collective over the data ranks."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    # Wrappers and compositions of metrics gather nothing themselves.
    with_states = [part for part in parts if part.metric_state] or parts
    return any(part.sync_on_compute and spans_data_ranks(part.process_group, dims) for part in with_states)


def spans_data_ranks(group: Any, dims: ParallelDims) -> bool:
    """Return whether `group`, a process group or `None`, has the data ranks and no others."""
    if group is None:
        return True
    return dist.get_world_size(group) == dims.data_size and dist.get_process_group_ranks(group) == dims.data_ranks


def _is_reduced(result: ResultMetric, dims: ParallelDims) -> bool:
    """Return whether the value of the epoch is computed by all data ranks together."""
    if not result.is_tensor:
        return synchronizes(result.value, dims)
    sync = result.meta.sync
    return sync.should and not sync.rank_zero_only and spans_data_ranks(sync.group, dims)


def _error(by_rank: dict[int, list[str]]) -> ConfigurationError:
    every = dict.fromkeys(key for keys in by_rank.values() for key in keys)
    partial = [key for key in every if not all(key in keys for keys in by_rank.values())]
    if partial:
        found = "; ".join(
            f"{key} only by rank {', '.join(str(rank) for rank, keys in by_rank.items() if key in keys)}"
            for key in partial[:8]
        )
    else:
        first, keys = next(iter(by_rank.items()))
        found = f"in another order: [{', '.join(keys)}] on rank {first}"
    are_metrics = {key.startswith(_METRIC) for key in partial or every}
    advice = " ".join(text for text, applies in ((EVERY_RANK, False), (_EVERY_METRIC, True)) if applies in are_metrics)
    how = "" if True in are_metrics else " with sync_dist=True"
    return ConfigurationError(f"The ranks have not logged the same keys{how} in this epoch: {found}. {advice}")
