"""The table of strategy names, and how Lightning's Trainer comes to know them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_paral.compat.lightning.strategy_lookup import check_before_lookup
from lightning_paral.errors import ConfigurationError
from lightning_paral.other_trainers import refuse_namesakes
from lightning_paral.strategies import ParalDDPStrategy, ParalDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.suggestions import did_you_mean, nearest_names


@dataclass(frozen=True, kw_only=True)
class RegisteredStrategy:
    """One name that `Trainer(strategy=...)` takes."""

    name: str
    strategy: type[Strategy]
    description: str
    """One line for people, without a full stop."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What `strategy` is constructed with."""


STRATEGIES = (
    RegisteredStrategy(
        name="paral_dp",
        strategy=ParalDPStrategy,
        description="One process, a thread per device; for trying things out: paral_ddp is faster",
    ),
    RegisteredStrategy(
        name="paral_ddp",
        strategy=ParalDDPStrategy,
        description="A replica per rank; gradients averaged during backward by the backend's own all-reduce",
    ),
    RegisteredStrategy(
        name="paral_ddp_ring",
        strategy=ParalDDPStrategy,
        arguments=MappingProxyType({"all_reduce": "ring"}),
        description="paral_ddp with our point-to-point ring all-reduce, on any backend",
    ),
    RegisteredStrategy(
        name="paral_fsdp",
        strategy=ParalFSDPStrategy,
        description="FSDP2: each rank holds its part of parameters, gradients and optimizer state",
    ),
    RegisteredStrategy(
        name="paral_fsdp_offload",
        strategy=ParalFSDPStrategy,
        arguments=MappingProxyType({"offload": True}),
        description="paral_fsdp with parameters, gradients and optimizer on the host",
    ),
    RegisteredStrategy(
        name="paral_zero1",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 1}),
        description="ZeRO-1: each rank holds its part of the optimizer state",
    ),
    RegisteredStrategy(
        name="paral_zero2",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 2}),
        description="ZeRO-2: each rank holds its part of the optimizer state and gradients",
    ),
    RegisteredStrategy(
        name="paral_zero3",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 3}),
        description="ZeRO-3: each rank holds its part of the optimizer state, gradients and parameters",
    ),
    RegisteredStrategy(
        name="paral_zero1_offload",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 1, "offload_optimizer": "cpu"}),
        description="paral_zero1 with the optimizer on the host",
    ),
    RegisteredStrategy(
        name="paral_zero2_offload",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 2, "offload_optimizer": "cpu"}),
        description="paral_zero2 with the optimizer on the host",
    ),
    RegisteredStrategy(
        name="paral_zero3_offload",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
        description="paral_zero3 with optimizer and parameters on the host",
    ),
    RegisteredStrategy(
        name="paral_zero3_nvme",
        strategy=ParalZeROStrategy,
        arguments=MappingProxyType({"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}),
        description="paral_zero3 with optimizer and parameters on NVMe, in the folder PARAL_NVME_PATH",
    ),
)


def register_strategies() -> None:
    """Register all names of `STRATEGIES` with Lightning's Trainer, and have Fabric and `pytorch_lightning` refuse them.

    Calling it again changes nothing.
    """
    for entry in STRATEGIES:
        StrategyRegistry.register(
            entry.name, entry.strategy, description=entry.description, override=True, **entry.arguments
        )
    check_before_lookup(accelerator_connector, _explain_unknown)
    refuse_namesakes(tuple(entry.name for entry in STRATEGIES))


def _explain_unknown(strategy: Any) -> None:
    """Raise an error that says what to write if `strategy` is a class, or a misspelled `paral_*` name."""
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ConfigurationError(
            f"Trainer(strategy={strategy.__name__}): this is the class itself. Give an object of it: "
            f"strategy={strategy.__name__}()."
        )
    if not isinstance(strategy, str):
        return
    name = strategy.lower()  # as Lightning looks it up
    if name not in StrategyRegistry and _is_meant_as_ours(name):
        raise ConfigurationError(explain_unknown_name(name))


def _is_meant_as_ours(name: str) -> bool:
    names = [entry.name for entry in STRATEGIES]
    return name.startswith("paral") or f"paral_{name}" in names or bool(nearest_names(name, names, 1, 0.85))


def explain_unknown_name(name: str) -> str:
    """Say which names are near to the misspelt `name`, and where names come from."""
    names = [entry.name for entry in STRATEGIES]
    classes = {entry.strategy.__name__.lower(): entry.strategy.__name__ for entry in STRATEGIES}
    if f"paral_{name}" in names:
        near = [f"paral_{name}"]
    else:
        near = nearest_names(name.replace("-", "_"), [*names, *classes])
    if near and near[0] in classes:
        class_name = classes[near[0]]
        return (
            f"There is no strategy named {name!r}. The class {class_name} is given as an object in Python, "
            f"strategy=lightning_paral.{class_name}(), and as class_path: lightning_paral.{class_name} in YAML."
        )
    hint = did_you_mean(near, quoted=True) if near else f"The names are {', '.join(names)}."
    return (
        f"There is no strategy named {name!r}. {hint} `paral strategies` describes them all; they exist in every "
        "process that has run `import lightning_paral`."
    )
