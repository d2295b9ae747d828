"""Measure the bytes that each rank sends per step under ZeRO, next to the paper's formula, in sizes of the model.

    python -m tests.benchmarks.zero_traffic

Counted by the kernel (gloo's headers included), over the steps of a fit beyond its first two: building and taking down,
which move the model as well, cancel out.
"""

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.comm import count_traffic
from tests.models.regression import FEATURES, Regression, regression_data
from tests.rank_pool import RankPool
from tests.running import quiet_trainer

WIDTH = 1024


class Wide(Regression):
    """A model of 2.1 million parameters, nearly all of them in matrices that stage 3 shards."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(torch.tanh(self.hidden(x))))


def model_sizes_sent_per_step(stage: int) -> float:
    """Return the bytes that this rank sends per step, in sizes of the model. *Collective* over the default group."""
    num_ranks = dist.get_world_size()
    model = Wide()
    persistence = {"zero_optimization": {"stage3_param_persistence_threshold": 10_000}}
    sent = []
    for num_batches in (2, 4):
        strategy = ParalZeROStrategy(stage=stage, deepspeed_config=persistence if stage == 3 else None)
        with count_traffic() as traffic:
            trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy)
            trainer.fit(model, regression_data(num_batches, num_ranks))
            dist.barrier()
        assert traffic.socket_bytes is not None
        sent.append(traffic.socket_bytes)
    return (sent[1] - sent[0]) / 2 / sum(4 * parameter.numel() for parameter in model.parameters())


def model_sizes_by_formula(stage: int, num_ranks: int) -> float:
    """Return the bytes that a rank sends per step according to the paper (arXiv:1910.02054, section 7)."""
    return (3 if stage == 3 else 2) * (num_ranks - 1) / num_ranks


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pool = RankPool()
    rows: list[list[Any]] = []
    for num_ranks in (2, 4):
        for stage in (1, 2, 3):
            ranks = pool.run(num_ranks, model_sizes_sent_per_step, stage)
            rows.append([num_ranks, stage, sum(ranks) / num_ranks, model_sizes_by_formula(stage, num_ranks)])
    print(tabulate(rows, headers=("ranks", "stage", "sent", "formula"), floatfmt=".3f"))
    pool.close()


if __name__ == "__main__":
    main()
