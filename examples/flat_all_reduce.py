"""A strategy of your own: each rank holds the model, and one all-reduce averages all gradients after a backward pass.

`import flat_all_reduce`, then `Trainer(strategy="flat_all_reduce", devices=2)`. The process group, the batches of each
rank, exact evaluation and checkpoints come from `ParalStrategy`; what it does is tested by the suites of `tests` after
one more row in their table (tests/contract/cases.py).
"""

from typing import Unpack

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_paral.options import RankOptions, takes_rank_options
from lightning_paral.registry import RegisteredStrategy, register_strategies
from lightning_paral.strategies.base import ParalStrategy


class FlatAllReduceStrategy(ParalStrategy, DDPStrategy):
    """One process per device, each with the whole model, which no module wraps."""

    @takes_rank_options
    def __init__(self, **options: Unpack[RankOptions]) -> None:
        super().__init__(**self._take_rank_options(options))

    # Process group: `ParalStrategy`.

    # Model wrapping

    def configure_ddp(self) -> None:
        """Start from rank 0's values on all ranks. *Collective* over the world."""
        assert self.lightning_module is not None
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients, those of micro-batches before this one included. *Collective* over the world."""
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        gradients = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.dims.data_size)
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `ParalStrategy`, which writes one file for strategies whose ranks hold everything.


register_strategies(
    RegisteredStrategy(
        name="flat_all_reduce",
        strategy=FlatAllReduceStrategy,
        description="A replica per rank; all gradients averaged by one all-reduce after the backward pass",
    )
)
