"""A strategy of your own: a full replica per rank, and one all-reduce of all gradients after each backward pass.

`import flat_all_reduce`, then `Trainer(strategy="flat_all_reduce", devices=2)`. The process group, the batches of each
rank, shared buffers, exact evaluation and checkpoints come from `ParalStrategy`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor

from lightning_paral.option_types import takes
from lightning_paral.options import RankOptions
from lightning_paral.strategies.base import ParalStrategy


@dataclass(frozen=True, kw_only=True)
class FlatAllReduceOptions(RankOptions):
    """The options of `FlatAllReduceStrategy`.

    Args:
        bucket_numel: elements per all-reduce. `None`: all gradients in one.
    """

    bucket_numel: int | None = None


class FlatAllReduceStrategy(ParalStrategy, DDPStrategy):
    """One process per device, each with a full replica that is not wrapped."""

    strategy_name = "flat_all_reduce"

    @takes(FlatAllReduceOptions)
    def __init__(self, options: FlatAllReduceOptions) -> None:
        super().__init__(options)
        self.bucket_numel = options.bucket_numel

    # Process group: `ParalStrategy`.

    # Model wrapping

    def configure_ddp(self) -> None:
        """Broadcast rank 0's parameters and buffers. *Collective* over the world."""
        assert self.lightning_module is not None
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients, including those accumulated before. *Collective* over the world."""
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        gradients = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.dims.data_size)
        for bucket in flat.split(self.bucket_numel or flat.numel()):
            dist.all_reduce(bucket)
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `ParalStrategy`, which writes one file, as every rank holds a full replica.


StrategyRegistry.register(
    "flat_all_reduce",
    FlatAllReduceStrategy,
    "A full model per rank; one all-reduce averages all gradients after the backward pass",
    override=True,  # the module may be imported again
)
