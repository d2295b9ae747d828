"""Measure the bytes of parameters, gradients and optimizer state on each rank under FSDP, next to the formula.

    python -m tests.benchmarks.fsdp_memory

Counted from the live tensors, at the end of a backward pass after the first step, in fp32: 4 bytes of parameters, 4 of
gradients and 8 of AdamW's moments per element, divided by the number of ranks; with two replicas, by half of it.
"""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral import ParalFSDPStrategy
from tests.benchmarks.zero_memory import NUM_ELEMENTS, Deep, count_bytes
from tests.models.regression import regression_data
from tests.rank_pool import RankPool
from tests.running import quiet_trainer

BYTES_PER_ELEMENT = {"parameters": 4, "gradients": 4, "optimizer": 8}


class Sharded(Deep):
    """A `Deep` model that counts its bytes after the second backward pass."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Do nothing: all bytes are counted at once."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            (optimizer,) = self.trainer.strategy.optimizers
            states = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
            self.held = {
                "parameters": count_bytes(_held(self.parameters())),
                "gradients": count_bytes(_held(parameter.grad for parameter in self.parameters())),
                "optimizer": count_bytes(_held(states)),
            }


def bytes_held(replicate: int) -> dict[str, int]:
    """Return the bytes on this rank by kind. *Collective* over the default group."""
    num_ranks = dist.get_world_size()
    model = Sharded()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=ParalFSDPStrategy(replicate=replicate))
    trainer.fit(model, regression_data(2, num_ranks))
    return model.held


def bytes_by_formula(num_ranks: int, replicate: int) -> dict[str, float]:
    """Return the bytes on a rank if all tensors are divided evenly."""
    return {kind: NUM_ELEMENTS * size * replicate / num_ranks for kind, size in BYTES_PER_ELEMENT.items()}


def _held(tensors: Any) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pool = RankPool()
    rows = []
    for num_ranks, replicate in ((1, 1), (2, 1), (4, 1), (4, 2)):
        ranks = pool.run(num_ranks, bytes_held, replicate)
        formula = bytes_by_formula(num_ranks, replicate)
        row: list[Any] = [num_ranks, replicate]
        for kind in BYTES_PER_ELEMENT:
            row += [max(held[kind] for held in ranks) / 1e6, formula[kind] / 1e6]
        rows.append(row)
    print(f"{NUM_ELEMENTS:,} parameters, 32-true; MB on the rank that holds most, and by the formula")
    headers = ("ranks", "replicas", "parameters", "formula", "gradients", "formula", "optimizer", "formula")
    print(tabulate(rows, headers=headers, floatfmt=".3f"))
    pool.close()


if __name__ == "__main__":
    main()
