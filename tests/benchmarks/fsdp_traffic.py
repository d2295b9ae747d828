"""Measure the bytes that each rank sends per step under FSDP, next to the formula, in sizes of the model.

    python -m tests.benchmarks.fsdp_traffic

Counted by the kernel (gloo's headers included), over the steps of a fit beyond its first two: building and taking down,
which move the model as well, cancel out. Parameters are gathered for forward and backward, gradients reduced once:
3(N-1)/N. `reshard_after_forward=False` gathers once: 2(N-1)/N.
"""

import logging
import warnings
from typing import Any

import torch.distributed as dist
from tabulate import tabulate

from lightning_paral import ParalFSDPStrategy
from lightning_paral.comm import count_traffic
from tests.benchmarks.zero_traffic import Wide
from tests.models.regression import regression_data
from tests.rank_pool import RankPool
from tests.running import quiet_trainer


def model_sizes_sent_per_step(reshard_after_forward: bool | None) -> float:
    """Return the bytes that this rank sends per step, in sizes of the model. *Collective* over the default group."""
    num_ranks = dist.get_world_size()
    model = Wide()
    sent = []
    for num_batches in (2, 4):
        strategy = ParalFSDPStrategy(units=["Linear"], reshard_after_forward=reshard_after_forward)
        with count_traffic() as traffic:
            trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy)
            trainer.fit(model, regression_data(num_batches, num_ranks))
            dist.barrier()
        assert traffic.socket_bytes is not None
        sent.append(traffic.socket_bytes)
    return (sent[1] - sent[0]) / 2 / sum(4 * parameter.numel() for parameter in model.parameters())


def model_sizes_by_formula(reshard_after_forward: bool | None, num_ranks: int) -> float:
    """Return the bytes that a rank sends per step by the formula."""
    return (2 if reshard_after_forward is False else 3) * (num_ranks - 1) / num_ranks


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pool = RankPool()
    rows: list[list[Any]] = []
    for num_ranks in (2, 4):
        for reshard in (None, False):
            ranks = pool.run(num_ranks, model_sizes_sent_per_step, reshard)
            rows.append([num_ranks, str(reshard), sum(ranks) / num_ranks, model_sizes_by_formula(reshard, num_ranks)])
    print(tabulate(rows, headers=("ranks", "reshard_after_forward", "sent", "formula"), floatfmt=".3f"))
    pool.close()


if __name__ == "__main__":
    main()
