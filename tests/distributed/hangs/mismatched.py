"""A user's script in which rank 1 skips an expert to which none of its samples belong: `mismatched.py STRATEGY`."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList

from lightning_paral import ParalFSDPStrategy, ParalZeROStrategy
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Expert(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Linear(8, width)
        self.outer = Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


class Experts(Regression):
    """Has two experts; rank 1 uses the second one only, which is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = ModuleList([Expert(16), Expert(64)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = torch.ones(2, 8)
        if self.global_rank == 0:
            x = self.experts[0](x)
        return self.experts[1](x).mean()


def main(name: str) -> None:
    strategy: Any = ParalFSDPStrategy(units=["Expert"])
    if name == "paral_zero3":
        config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
        strategy = ParalZeROStrategy(stage=3, deepspeed_config=config)
    quiet_trainer(devices=2, max_steps=2, strategy=strategy).fit(Experts(), regression_data(3, 2))


if __name__ == "__main__":
    main(sys.argv[1])
