"""Count the bytes of parameters, gradients and optimizer states on a rank from live tensors, under DDP and FSDP."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.benchmarks.common import bytes_of
from tests.benchmarks.zero_memory import Deep
from tests.models.regression import regression_data
from tests.running import quiet_trainer


class Counted(Deep):
    """Counts in the second step, when all states exist."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Count nothing: gradients exist until the optimizer steps."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            parameters = list(self.parameters())
            states = self.optimizers().optimizer.state.values()
            moments = [value for state in states for value in state.values() if value.dim()]
            self.held = {
                "parameters": bytes_of(_local(parameters)),
                "gradients": bytes_of(_local(parameter.grad for parameter in parameters)),
                "optimizer": bytes_of(_local(moments)),
            }


def _local(tensors: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    for tensor in tensors:
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def states_held(strategy: str) -> dict[str, int]:
    """Return the bytes on this rank by kind. *Collective* over the default group."""
    model, num_ranks = Counted(), dist.get_world_size()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy)
    trainer.fit(model, regression_data(4, num_ranks))
    return model.held
