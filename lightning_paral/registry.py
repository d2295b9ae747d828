"""The table of strategy names, and their registration with Lightning's Trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_paral.compat.lightning.strategy_lookup import check_before_lookup
from lightning_paral.errors import ConfigurationError
from lightning_paral.other_trainers import refuse_in_other_trainers
from lightning_paral.strategies import (
    ParalAutoStrategy,
    ParalDDPStrategy,
    ParalDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)
from lightning_paral.suggestions import did_you_mean, nearest_names


@dataclass(frozen=True, kw_only=True)
class RegisteredStrategy:
    """A name for `Trainer(strategy=...)`, and the strategy that it creates."""

    name: str
    strategy: type[Strategy]
    description: str
    """One line for users, without a period at the end."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Keyword arguments for the constructor of `strategy`."""


STRATEGIES = (
    RegisteredStrategy(
        name="paral_auto",
        strategy=ParalAutoStrategy,
        description="Plans the memory of a fit, and becomes the cheapest strategy below that fits",
    ),
    RegisteredStrategy(
        name="paral_dp",
        strategy=ParalDPStrategy,
        description="One process with a thread per device, for debugging; paral_ddp is faster",
    ),
    RegisteredStrategy(
        name="paral_ddp",
        strategy=ParalDDPStrategy,
        description="A full model per rank; the backend's all-reduce averages gradients during the backward pass",
    ),
    RegisteredStrategy(
        name="paral_ddp_ring",
        strategy=ParalDDPStrategy,
        arguments=MappingProxyType({"all_reduce": "ring"}),
        description="paral_ddp with our point-to-point ring all-reduce, for any backend",
    ),
    RegisteredStrategy(
        name="paral_fsdp",
        strategy=ParalFSDPStrategy,
        description="FSDP2: parameters, gradients and optimizer state are sharded",
    ),
    RegisteredStrategy(
        name="paral_fsdp_offload",
        strategy=ParalFSDPStrategy,
        arguments=MappingProxyType({"offload": True}),
        description="paral_fsdp with parameters, gradients and optimizer state in host memory",
    ),
    RegisteredStrategy(
        name="paral_zero1",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 1}),
        description="ZeRO-1: the optimizer state is sharded",
    ),
    RegisteredStrategy(
        name="paral_zero2",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 2}),
        description="ZeRO-2: optimizer state and gradients are sharded",
    ),
    RegisteredStrategy(
        name="paral_zero3",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 3}),
        description="ZeRO-3: optimizer state, gradients and parameters are sharded",
    ),
    RegisteredStrategy(
        name="paral_zero1_offload",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 1, "offload_optimizer": "cpu"}),
        description="paral_zero1 with the optimizer in host memory",
    ),
    RegisteredStrategy(
        name="paral_zero2_offload",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 2, "offload_optimizer": "cpu"}),
        description="paral_zero2 with the optimizer in host memory",
    ),
    RegisteredStrategy(
        name="paral_zero3_offload",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
        description="paral_zero3 with optimizer and parameters in host memory",
    ),
    RegisteredStrategy(
        name="paral_zero3_nvme",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}),
        description="paral_zero3 with optimizer and parameters on NVMe, in the folder PARAL_NVME_PATH",
    ),
    RegisteredStrategy(
        name="paral_tp",
        strategy=ParalFSDPStrategy,
        arguments=MappingProxyType({"tensor_parallel": "node"}),
        description="Tensor parallel: all ranks of a node compute each layer together, each some of its features",
    ),
    RegisteredStrategy(
        name="paral_fsdp_tp",
        strategy=ParalFSDPStrategy,
        arguments=MappingProxyType({"tensor_parallel": 2}),
        description="paral_tp over pairs of ranks, and paral_fsdp over the pairs",
    ),
    RegisteredStrategy(
        name="paral_pp",
        strategy=ParalPipelineStrategy,
        description="Pipeline parallel: each rank has some of the layers, and micro-batches pass from rank to rank",
    ),
)


_START_METHODS = {"notebook": "fork", "fork": "fork", "spawn": "spawn"}
"""Last parts of names of Lightning's strategies, such as `ddp_notebook`, and the start methods that they select."""


def register_strategies(*more: RegisteredStrategy) -> None:
    """Register the strategies with Lightning's Trainer, and make Fabric and `pytorch_lightning` reject them.

    Calling this again changes nothing.

    Args:
        more: your own strategies, in addition to those in `STRATEGIES`.
    """
    entries = (*STRATEGIES, *more)
    for entry in entries:
        StrategyRegistry.register(
            entry.name, entry.strategy, description=entry.description, override=True, **entry.arguments
        )
    check_before_lookup(accelerator_connector, _reject_unknown)
    refuse_in_other_trainers(tuple(entry.name for entry in entries))


def _reject_unknown(strategy: Any) -> None:
    """Raise a `ConfigurationError` if `strategy` is a class or a misspelled `paral_*` name; say what to write."""
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ConfigurationError(
            f"Trainer(strategy={strategy.__name__}): this is the class itself. Pass an instance: "
            f"strategy={strategy.__name__}()."
        )
    if not isinstance(strategy, str):
        return
    name = strategy.lower()  # as Lightning looks it up
    is_known = name == "auto" or name in StrategyRegistry  # Lightning's own choice is not in the registry
    if not is_known and _looks_like_ours(name):
        raise ConfigurationError(explain_unknown_name(name))


def _looks_like_ours(name: str) -> bool:
    names = [entry.name for entry in STRATEGIES]
    return name.startswith("paral") or f"paral_{name}" in names or bool(nearest_names(name, names, 1, 0.85))


def explain_unknown_name(name: str) -> str:
    """Return a message that `name` is unknown, with the most similar names and how to register them."""
    names = [entry.name for entry in STRATEGIES]
    stem, _, method = name.rpartition("_")
    if stem in names and method in _START_METHODS:
        strategy = next(entry.strategy.__name__ for entry in STRATEGIES if entry.name == stem)
        return (
            f"There is no strategy named {name!r}. Use {stem!r}, which forks the ranks in a notebook. To choose how "
            f"ranks are started, pass strategy=lightning_paral.{strategy}(start_method={_START_METHODS[method]!r})."
        )
    classes = {entry.strategy.__name__.lower(): entry.strategy.__name__ for entry in STRATEGIES}
    if f"paral_{name}" in names:
        near = [f"paral_{name}"]
    else:
        near = nearest_names(name.replace("-", "_"), [*names, *classes])
    if near and near[0] in classes:
        class_name = classes[near[0]]
        return (
            f"There is no strategy named {name!r}. {class_name} is a class: write "
            f"strategy=lightning_paral.{class_name}() in Python, or class_path: lightning_paral.{class_name} in YAML."
        )
    hint = did_you_mean(near, quoted=True) if near else f"The names are {', '.join(names)}."
    return (
        f"There is no strategy named {name!r}. {hint} `paral strategies` lists all names. `import lightning_paral` "
        "registers them."
    )
