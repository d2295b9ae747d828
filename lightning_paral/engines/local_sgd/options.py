"""The options of `ParalLocalSGDStrategy`, and what it cannot train."""

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lightning.pytorch import LightningModule
from torch.optim import LBFGS

from lightning_paral.distributed.mesh import ParallelDims, check_divides
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import AtLeast, Positive
from lightning_paral.options import RankOptions
from lightning_paral.planning.layout import Layout

PERIOD_VARIABLE = "PARAL_PERIOD"
"""The environment variable with the period of a strategy that is selected by name."""


@dataclass(frozen=True, kw_only=True)
class LocalSGDOptions(RankOptions):
    """The options of `ParalLocalSGDStrategy`.

    Args:
        period: the number of optimizer steps between two exchanges of weights. There is no default: more steps need
            less traffic and change what is learned. `None`: the environment variable PARAL_PERIOD, for a strategy that
            is selected by name.
        warmup_steps: for this number of optimizer steps, average the gradients of all ranks in each step, as
            `paral_ddp` does, before the islands part.
        islands: which ranks average their gradients in each step: `"rank"`: none; `"node"`: those of a node; a number:
            that many consecutive ranks.
        outer_lr, outer_momentum, nesterov: the SGD that applies what the islands have learned on average, in each
            exchange. The defaults set the weights to the mean. `paral_diloco` has 0.7, 0.9 and `True`.
        wire_dtype: how changes of weights travel: as `"bf16"`; as `"int8"`, with a scale for each 512 elements, where
            what rounding removes is sent in the next exchange. `None`: in the dtype of the weights, at least fp32.
        backup: where the first rank of an island keeps the weights of the last exchange, their momentum and the errors
            of int8: `"cpu"` or `"device"`.

    Raises:
        ConfigurationError: there is no period, or the outer SGD cannot be made.
    """

    period: Positive | None = None
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    islands: Literal["rank", "node"] | Positive = "rank"
    outer_lr: Annotated[float, AtLeast(0)] = 1.0
    outer_momentum: Annotated[float, AtLeast(0)] = 0.0
    nesterov: bool = False
    wire_dtype: Literal["bf16", "int8"] | None = None
    backup: Literal["cpu", "device"] = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_between < 1:
            raise ConfigurationError(
                f"{self.strategy_name} needs a period, the number of optimizer steps between two exchanges: "
                f"ParalLocalSGDStrategy(period=50), or for a strategy selected by name {PERIOD_VARIABLE}=50."
            )
        if self.nesterov and not self.outer_momentum:
            raise ConfigurationError("nesterov=True needs an outer_momentum, such as DiLoCo's outer_momentum=0.9.")

    @property
    def steps_between(self) -> int:
        """The period, or that of the environment variable; 0 if there is none."""
        given = os.environ.get(PERIOD_VARIABLE, "")
        return self.period or (int(given) if given.isdecimal() else 0)

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        return "paral_diloco" if self.nesterov else "paral_local_sgd"

    @property
    def layout(self) -> Layout:
        """How a plan counts the strategy."""
        recomputes = self.activation_checkpointing is not None
        return Layout(strategy=self.strategy_name, engine="ddp", recomputes=recomputes, period=self.steps_between)

    def arrange(self, rank: int, num_ranks: int, per_node: int) -> ParallelDims:
        """Return the islands as dimensions: each is a replica, and its ranks are the shards."""
        size = int({"rank": 1, "node": per_node}.get(str(self.islands), self.islands))
        check_divides(f"islands={self.islands!r}", size, num_ranks, "ranks", "each island has that many")
        return ParallelDims(rank=rank, replicate=num_ranks // size, shard=size)


def check_run(strategy: Any, module: LightningModule | None = None) -> None:
    """Raise a `ConfigurationError` if islands cannot train in this way; with a module, check it and its optimizers."""
    precision, optimizers = strategy.precision_plugin.precision, strategy.optimizers
    obstacles = {
        'split="global" promises the numbers of one process, which islands lack': strategy.sampling.split == "global",
        'with precision="16-mixed" each island would skip other steps': precision == "16-mixed",
        "manual optimization has no steps to count": module is not None and not module.automatic_optimization,
        "LBFGS needs several gradients in a step": any(isinstance(each, LBFGS) for each in optimizers),
    }
    for why in [why for why, is_present in obstacles.items() if is_present]:
        raise ConfigurationError(f"Local SGD cannot be used here: {why}. Change that, or use paral_ddp.")
