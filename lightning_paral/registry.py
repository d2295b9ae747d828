"""The table of strategy names, and their registration with Lightning's Trainer."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_paral.compat.lightning.strategy_lookup import check_before_lookup
from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names


@dataclass(frozen=True, kw_only=True)
class RegisteredStrategy:
    """A name for `Trainer(strategy=...)`, and the strategy that it creates."""

    name: str
    class_path: str
    """The module and the name of the class, which is imported when it is used first."""
    arguments: Mapping[str, Any]
    """Keyword arguments for the constructor of the class."""
    description: str
    """One line for users, without a period at the end."""

    @property
    def module(self) -> str:
        """The module of the class."""
        return self.class_path.rpartition(".")[0]

    @property
    def class_name(self) -> str:
        """The name of the class."""
        return self.class_path.rpartition(".")[2]

    @property
    def strategy(self) -> type[Strategy]:
        """The class. The first use imports it."""
        found: type[Strategy] = getattr(importlib.import_module(self.module), self.class_name)
        return found

    def create(self, **arguments: Any) -> Strategy:
        """Return a new strategy."""
        return self.strategy(**arguments)


_DDP = "ddp.ParalDDPStrategy"
_FSDP = "fsdp.ParalFSDPStrategy"
_ZERO = "zero.ParalZeROStrategy"
_TABLE: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    (
        "paral_auto",
        "auto.ParalAutoStrategy",
        {},
        "Plans the memory of a fit, and becomes the cheapest strategy below that fits",
    ),
    (
        "paral_dp",
        "dp.ParalDPStrategy",
        {},
        "One process with a thread per device, for debugging; paral_ddp is faster",
    ),
    (
        "paral_ddp",
        _DDP,
        {},
        "A full model per rank; the backend's all-reduce averages gradients during the backward pass",
    ),
    (
        "paral_ddp_ring",
        _DDP,
        {"all_reduce": "ring"},
        "paral_ddp with our point-to-point ring all-reduce, for any backend",
    ),
    ("paral_fsdp", _FSDP, {}, "FSDP2: parameters, gradients and optimizer state are sharded"),
    (
        "paral_fsdp_offload",
        _FSDP,
        {"offload": True},
        "paral_fsdp with parameters, gradients and optimizer state in host memory",
    ),
    ("paral_zero1", _ZERO, {"stage": 1}, "ZeRO-1: the optimizer state is sharded"),
    ("paral_zero2", _ZERO, {"stage": 2}, "ZeRO-2: optimizer state and gradients are sharded"),
    ("paral_zero3", _ZERO, {"stage": 3}, "ZeRO-3: optimizer state, gradients and parameters are sharded"),
    (
        "paral_zero1_offload",
        _ZERO,
        {"stage": 1, "offload_optimizer": "cpu"},
        "paral_zero1 with the optimizer in host memory",
    ),
    (
        "paral_zero2_offload",
        _ZERO,
        {"stage": 2, "offload_optimizer": "cpu"},
        "paral_zero2 with the optimizer in host memory",
    ),
    (
        "paral_zero3_offload",
        _ZERO,
        {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        "paral_zero3 with optimizer and parameters in host memory",
    ),
    (
        "paral_zero3_nvme",
        _ZERO,
        {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"},
        "paral_zero3 with optimizer and parameters on NVMe, in the folder PARAL_NVME_PATH",
    ),
    (
        "paral_tp",
        _FSDP,
        {"tensor_parallel": "node"},
        "Tensor parallel: all ranks of a node compute each layer together, each some of its features",
    ),
    (
        "paral_fsdp_tp",
        _FSDP,
        {"tensor_parallel": 2},
        "paral_tp over pairs of ranks, and paral_fsdp over the pairs",
    ),
    (
        "paral_pp",
        "pipeline.ParalPipelineStrategy",
        {},
        "Pipeline parallel: each rank has some of the layers, and micro-batches pass from rank to rank",
    ),
)
STRATEGIES = tuple(
    RegisteredStrategy(
        name=name,
        class_path=f"lightning_paral.strategies.{path}",
        arguments=MappingProxyType(arguments),
        description=description,
    )
    for name, path, arguments, description in _TABLE
)

_START_METHODS = {"notebook": "fork", "fork": "fork", "spawn": "spawn"}
"""Last parts of names of Lightning's strategies, such as `ddp_notebook`, and the start methods that they select."""


def register_strategies() -> None:
    """Register the strategies with Lightning's Trainer. In Fabric, their names raise a `ConfigurationError`.

    `import lightning_paral` calls this. Calling it again changes nothing.
    """
    for entry in STRATEGIES:
        arguments = dict(entry.arguments)
        StrategyRegistry.register(entry.name, entry.create, entry.description, override=True, **arguments)
        refuse = partial(_refuse_in_fabric, entry.name)
        STRATEGY_REGISTRY.register(entry.name, refuse, "Only for lightning.pytorch.Trainer", override=True)
    check_before_lookup(_reject_unknown)


def _refuse_in_fabric(name: str) -> NoReturn:
    raise ConfigurationError(
        f"{name!r} is a strategy for Lightning's Trainer. Fabric has no Trainer to call its hooks. Use "
        f"lightning.pytorch.Trainer(strategy={name!r}), or one of Fabric's own strategies: 'ddp', 'fsdp', 'deepspeed'."
    )


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
    classes = {entry.name: entry.class_name for entry in STRATEGIES}
    lowered = {class_name.lower(): class_name for class_name in classes.values()}
    stem, _, method = name.rpartition("_")
    if stem in classes and method in _START_METHODS:
        hint = (
            f"Use {stem!r}, which forks the ranks in a notebook. To choose how ranks are started, pass "
            f"strategy=lightning_paral.{classes[stem]}(start_method={_START_METHODS[method]!r})."
        )
        return f"There is no strategy named {name!r}. {hint}"
    is_short = f"paral_{name}" in classes
    near = [f"paral_{name}"] if is_short else nearest_names(name.replace("-", "_"), [*classes, *lowered])
    if near and near[0] in lowered:
        class_name = lowered[near[0]]
        return (
            f"There is no strategy named {name!r}. {class_name} is a class: write "
            f"strategy=lightning_paral.{class_name}() in Python, or class_path: lightning_paral.{class_name} in YAML."
        )
    hint = did_you_mean(near, quoted=True) if near else f"The names are {', '.join(classes)}."
    return (
        f"There is no strategy named {name!r}. {hint} `paral strategies` lists all names. `import lightning_paral` "
        "registers them."
    )
