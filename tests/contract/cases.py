"""The table of strategies under test, from which every suite takes its parameters.

The environment variable `PARAL_MORE_CASES` lists modules, separated by commas, whose `CASES` are added to the table.
With it the suites run on strategies of other packages.
"""

import importlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_paral import ActivationCheckpointing, Offload, ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from tests.contract.case import StrategyCase

MORE_CASES = "PARAL_MORE_CASES"
LINEAR = ActivationCheckpointing(units=["Linear"])


def on_nvme() -> dict[str, Any]:
    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme")
    folder.mkdir(exist_ok=True)
    offload = Offload("nvme", path=folder, buffer_numel=1_100_000)
    return {"stage": 3, "offload_optimizer": offload, "offload_parameters": offload}


def variant(label: str, constructor: Any = None, **row: Any) -> StrategyCase:
    """Return a case that differs from another case in an option only."""
    settings: dict[str, Any] = {"differs_in": "option", "resumes_others": False, "world_sizes": (1, 2, 4)}
    return StrategyCase(label=label, constructor=constructor, **(settings | row))


def ddp(label: str, world_sizes: tuple[int, ...] = (1, 2, 4), **options: Any) -> StrategyCase:
    return variant(label, ParalDDPStrategy, options=options, world_sizes=world_sizes)


def fsdp(label: str, world_sizes: tuple[int, ...] = (1, 2, 4), **options: Any) -> StrategyCase:
    return variant(label, ParalFSDPStrategy, options=options, world_sizes=world_sizes, shards_parameters=True)


def offloaded(label: str, constructor: Any = None, **row: Any) -> StrategyCase:
    return variant(label, constructor, **({"world_sizes": (2, 4)} | row))


OWN_CASES = (
    StrategyCase(label="paral_dp", world_sizes=(), devices_per_process=(1, 2, 3, 4), themes_of_user_code="all"),
    StrategyCase(label="paral_ddp", themes_of_user_code="all"),
    # Only the reduction of gradients differs from paral_ddp.
    variant("paral_ddp_ring", themes_of_user_code=("gradients", "freezing", "buffers")),
    ddp("ddp_reduce_broadcast", all_reduce="reduce_broadcast"),
    ddp("ddp_all_to_all", all_reduce="all_to_all"),
    ddp("ddp_small_buckets", all_reduce="ring", bucket_cap_mb=0.0001),
    ddp("ddp_static_graph", static_graph=True),
    ddp("ddp_checkpointing", world_sizes=(2,), activation_checkpointing=LINEAR),
    StrategyCase(label="paral_fsdp", shards_parameters=True, themes_of_user_code="all"),
    variant("paral_fsdp_offload", shards_parameters=True, themes_of_user_code="named"),
    fsdp("fsdp_class", units=["Linear"]),
    fsdp("fsdp_unsharded", units=["Linear"], accumulate="unsharded", world_sizes=(2, 4)),
    fsdp("fsdp_hybrid", units=["Linear"], replicate=2, world_sizes=(2, 4)),
    fsdp("fsdp_hybrid_unsharded", units=["Linear"], replicate=2, accumulate="unsharded", world_sizes=(4,)),
    fsdp("fsdp_checkpointing", activation_checkpointing=LINEAR, world_sizes=(2, 4)),
    StrategyCase(label="paral_zero1", differs_in="optimizer", themes_of_user_code="all"),
    StrategyCase(label="paral_zero2", themes_of_user_code="all"),
    StrategyCase(label="paral_zero3", differs_in="parameters", shards_parameters=True, themes_of_user_code="named"),
    # By default parameters with fewer than 100,000 elements are not partitioned.
    variant(
        "zero3_partitioned",
        ParalZeROStrategy,
        options={"stage": 3, "deepspeed_config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
        shards_parameters=True,
        world_sizes=(2,),
        themes_of_user_code="all",
    ),
    offloaded("paral_zero1_offload"),
    offloaded("paral_zero2_offload", world_sizes=(1, 2, 4), resumes_others=True, themes_of_user_code="named"),
    offloaded("paral_zero3_offload", shards_parameters=True, themes_of_user_code="named"),
    offloaded(
        "paral_zero3_nvme",
        ParalZeROStrategy,
        options=on_nvme,
        shards_parameters=True,
        world_sizes=(1, 2, 4),
        resumes_others=True,
    ),
)
"""The strategies of this package. The documented tables have columns for these only."""

CASES: tuple[StrategyCase, ...] = (
    *OWN_CASES,
    *(
        case
        for module in filter(None, os.environ.get(MORE_CASES, "").split(","))
        for case in importlib.import_module(module).CASES
    ),
)
BY_LABEL = {case.label: case for case in CASES}

MAIN = tuple(case for case in CASES if case.differs_in != "option")
PER_ENGINE = tuple(case for case in MAIN if case.differs_in == "engine")
"""For behavior that depends on the engine only, such as when loops end."""
PER_PLACEMENT = tuple(case for case in MAIN if case.differs_in != "optimizer")
"""For behavior that does not depend on the optimizer, in which alone ZeRO stages 1 and 2 differ."""


def with_ranks(cases: Iterable[StrategyCase], *world_sizes: int) -> tuple[StrategyCase, ...]:
    """Return the cases with a process per device that run with each of `world_sizes`."""
    return tuple(case for case in cases if case.has_ranks and set(world_sizes) <= set(case.world_sizes))


def labels(cases: Iterable[StrategyCase]) -> tuple[str, ...]:
    return tuple(case.label for case in cases)


def strategy_of(label: str, **options: Any) -> Any:
    """Return a new strategy of the case with `options` added.

    For "one process", return Lightning's own strategy. Any other label that is not a case is returned unchanged.
    """
    if label not in BY_LABEL:
        return "auto" if label == "one process" else label
    return BY_LABEL[label].strategy(**options)
