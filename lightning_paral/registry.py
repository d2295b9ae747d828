"""The table of strategy names, and their registration with Lightning's Trainer."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_paral.text import did_you_mean, nearest_names


@dataclass(frozen=True, kw_only=True)
class RegisteredStrategy:
    """A name for `Trainer(strategy=...)`, and the strategy that it creates."""

    name: str
    module: str
    """The module of the class, which is imported when it is used first."""
    class_name: str
    arguments: Mapping[str, Any]
    """Keyword arguments for the constructor of the class."""
    description: str
    """One line for users, without a period at the end."""

    @property
    def strategy(self) -> type[Strategy]:
        """The class. The first use imports it."""
        found: type[Strategy] = getattr(importlib.import_module(self.module), self.class_name)
        return found

    def create(self, **arguments: Any) -> Strategy:
        """Return a new strategy."""
        return self.strategy(**arguments)


def _ours(name: str, class_name: str, description: str, **arguments: Any) -> RegisteredStrategy:
    file = class_name.removeprefix("Paral").removesuffix("Strategy").lower().replace("localsgd", "local_sgd")
    module = f"lightning_paral.strategies.{file}"
    arguments = MappingProxyType(arguments)  # type: ignore[assignment]
    return RegisteredStrategy(
        name=name, module=module, class_name=class_name, arguments=arguments, description=description
    )


_DDP, _FSDP, _ZERO, _PIPELINE = "ParalDDPStrategy", "ParalFSDPStrategy", "ParalZeROStrategy", "ParalPipelineStrategy"
_LOCAL = "ParalLocalSGDStrategy"
_OPTIMIZER = {"offload_optimizer": "cpu"}
_BOTH = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
_NVME = {"offload_optimizer": "nvme", "offload_parameters": "nvme"}
_DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
STRATEGIES = (
    _ours("paral_auto", "ParalAutoStrategy", "Plans a fit, and becomes the cheapest strategy below that fits"),
    _ours("paral_dp", "ParalDPStrategy", "One process with a thread per device, for debugging; paral_ddp is faster"),
    _ours("paral_ddp", _DDP, "A full model per rank; an all-reduce averages gradients during the backward pass"),
    _ours("paral_ddp_ring", _DDP, "paral_ddp with our ring all-reduce, for any backend", all_reduce="ring"),
    _ours("paral_fsdp", _FSDP, "FSDP2: parameters, gradients and optimizer state are sharded"),
    _ours("paral_fsdp_offload", _FSDP, "paral_fsdp with all of these in host memory", offload=True),
    _ours("paral_zero1", _ZERO, "ZeRO-1: the optimizer state is sharded", stage=1),
    _ours("paral_zero2", _ZERO, "ZeRO-2: optimizer state and gradients are sharded", stage=2),
    _ours("paral_zero3", _ZERO, "ZeRO-3: optimizer state, gradients and parameters are sharded", stage=3),
    _ours("paral_zero1_offload", _ZERO, "paral_zero1 with the optimizer in host memory", stage=1, **_OPTIMIZER),
    _ours("paral_zero2_offload", _ZERO, "paral_zero2 with the optimizer in host memory", stage=2, **_OPTIMIZER),
    _ours("paral_zero3_offload", _ZERO, "paral_zero3 with optimizer and parameters in host memory", stage=3, **_BOTH),
    _ours("paral_zero3_nvme", _ZERO, "paral_zero3 with both on NVMe, in PARAL_NVME_PATH", stage=3, **_NVME),
    _ours("paral_tp", _FSDP, "Tensor parallel: a node's ranks compute each layer together", tensor_parallel="node"),
    _ours("paral_fsdp_tp", _FSDP, "paral_tp over pairs of ranks, and paral_fsdp over the pairs", tensor_parallel=2),
    _ours("paral_pp", _PIPELINE, "Pipeline parallel: each rank has some of the layers, and passes on micro-batches"),
    _ours("paral_pp_tp", _PIPELINE, "paral_pp with a pair of ranks per stage, and paral_tp in it", tensor_parallel=2),
    _ours("paral_local_sgd", _LOCAL, "Ranks train apart, and exchange their weights every PARAL_PERIOD steps"),
    _ours("paral_diloco", _LOCAL, "paral_local_sgd with DiLoCo's outer optimizer: Nesterov's momentum", **_DILOCO),
)


def register_strategies() -> None:
    """Register the strategies with Lightning's Trainer.

    `import lightning_paral` calls this. Calling it again changes nothing.
    """
    for entry in STRATEGIES:
        arguments = dict(entry.arguments)
        StrategyRegistry.register(entry.name, entry.create, entry.description, override=True, **arguments)


def explain_unknown_name(name: str) -> str:
    """Return a message that `name` is unknown, with the most similar names."""
    names = [entry.name for entry in STRATEGIES]
    full_name = f"paral_{name.lower().replace('-', '_').removeprefix('paral_')}"
    hint = did_you_mean(nearest_names(full_name, names), quoted=True) or f"The names are {', '.join(names)}."
    return f"There is no strategy named {name!r}. {hint} `paral strategies` explains them."
