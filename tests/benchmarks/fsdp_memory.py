"""Measure the bytes of parameters, gradients and optimizer state on each rank under FSDP, next to the formula.

    python -m tests.benchmarks.fsdp_memory

Counted from the live tensors, at the end of a backward pass after the first step, in fp32: 4 bytes of parameters, 4 of
gradients and 8 of AdamW's moments per element, divided by the number of ranks; with two replicas, by half of it.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_paral import ParalFSDPStrategy
from tests.benchmarks.common import bytes_of
from tests.benchmarks.zero_memory import NUM_ELEMENTS, Deep, print_bytes
from tests.models.regression import regression_data
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
            gradients = [parameter.grad for parameter in self.parameters()]
            kinds = {"parameters": self.parameters(), "gradients": gradients, "optimizer": states}
            self.held = {
                kind: bytes_of(each.to_local() if isinstance(each, DTensor) else each for each in held)
                for kind, held in kinds.items()
            }


def bytes_held(replicate: int) -> dict[str, int]:
    """Return the bytes on this rank by kind. *Collective* over the default group."""
    num_ranks = dist.get_world_size()
    model = Sharded()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=ParalFSDPStrategy(replicate=replicate))
    trainer.fit(model, regression_data(2, num_ranks))
    return model.held


def bytes_by_formula(replicate: int, num_ranks: int) -> dict[str, float]:
    """Return the bytes on a rank if all tensors are divided evenly."""
    return {kind: NUM_ELEMENTS * size * replicate / num_ranks for kind, size in BYTES_PER_ELEMENT.items()}


if __name__ == "__main__":
    print_bytes("32-true", ("ranks", "replicas"), ((1, 1), (2, 1), (4, 1), (4, 2)), bytes_held, bytes_by_formula)
