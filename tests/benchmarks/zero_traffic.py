"""Measure the bytes that each rank sends per step under ZeRO, next to the paper's formula, in sizes of the model.

    python -m tests.benchmarks.zero_traffic

Counted by the kernel (gloo's headers included), over the steps of a fit beyond its first two: building and taking down,
which move the model as well, cancel out.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.comm import count_traffic
from tests.benchmarks.common import print_table, silent_ranks
from tests.models.regression import FEATURES, Regression, regression_data
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


def sent_per_step(make_strategy: Callable[[], Any]) -> float:
    """Return the bytes that this rank sends per step, in sizes of the model. *Collective* over the default group."""
    num_ranks, model, sent = dist.get_world_size(), Wide(), []
    for num_batches in (2, 4):
        with count_traffic() as traffic:
            trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=make_strategy())
            trainer.fit(model, regression_data(num_batches, num_ranks))
            dist.barrier()
        assert traffic.socket_bytes is not None
        sent.append(traffic.socket_bytes)
    return (sent[1] - sent[0]) / 2 / sum(4 * parameter.numel() for parameter in model.parameters())


def model_sizes_sent_per_step(stage: int) -> float:
    """Return what this rank sends under ZeRO. *Collective* over the default group."""
    persistence = {"zero_optimization": {"stage3_param_persistence_threshold": 10_000}}
    options = {"deepspeed_config": persistence} if stage == 3 else {}
    return sent_per_step(lambda: ParalZeROStrategy(stage=stage, **options))


def model_sizes_by_formula(stage: int, num_ranks: int) -> float:
    """Return what a rank sends per step according to the paper (arXiv:1910.02054, section 7), in sizes of the model."""
    return (3 if stage == 3 else 2) * (num_ranks - 1) / num_ranks


def print_sent(
    header: str, options: Iterable[Any], sent: Callable[[Any], float], formula: Callable[[Any, int], float]
) -> None:
    """Print what ranks send with each value of an option, beside the formula."""
    with silent_ranks() as on_ranks:
        rows = [
            (num_ranks, str(option), sum(on_ranks(num_ranks, sent, option)) / num_ranks, formula(option, num_ranks))
            for num_ranks in (2, 4)
            for option in options
        ]
    print_table(("ranks", header, "sent", "formula"), rows, ".3f")


if __name__ == "__main__":
    print_sent("stage", (1, 2, 3), model_sizes_sent_per_step, model_sizes_by_formula)
