"""The strategies every contract runs for: one row each, by what the Trainer is given."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

import lightning_paral
from lightning_paral import ActivationCheckpointing, Offload, ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy


@dataclass(frozen=True)
class Case:
    """A strategy under test."""

    label: str
    strategy: Callable[[], str | Strategy]
    """Makes what is passed as `Trainer(strategy=...)`: anew for each Trainer."""
    tolerance: float = 1e-5
    """Largest difference to one process, absolute for weights and relative for losses."""
    world_sizes: tuple[int, ...] = (1, 2, 4)
    num_devices_per_process: tuple[int, ...] = ()
    """For a strategy that has all its devices in one process, and no ranks: the numbers of devices to try."""


def zero3_nvme() -> ParalZeROStrategy:
    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme")
    folder.mkdir(exist_ok=True)
    offload = Offload("nvme", path=folder, buffer_numel=10_000)
    return ParalZeROStrategy(stage=3, offload_optimizer=offload, offload_parameters=offload)


CASES = (
    Case("paral_dp", lambda: "paral_dp", world_sizes=(), num_devices_per_process=(1, 2, 3, 4)),
    Case("paral_ddp", lambda: "paral_ddp"),
    Case("paral_ddp_ring", lambda: "paral_ddp_ring"),
    Case("ddp_reduce_broadcast", lambda: ParalDDPStrategy(all_reduce="reduce_broadcast")),
    Case("ddp_all_to_all", lambda: ParalDDPStrategy(all_reduce="all_to_all")),
    Case("ddp_small_buckets", lambda: ParalDDPStrategy(all_reduce="ring", bucket_cap_mb=0.0001)),
    Case("ddp_static_graph", lambda: ParalDDPStrategy(static_graph=True)),
    Case("paral_fsdp", lambda: "paral_fsdp"),
    Case("paral_fsdp_offload", lambda: "paral_fsdp_offload"),
    Case("fsdp_class", lambda: ParalFSDPStrategy(units=["Linear"])),
    Case("fsdp_min_params", lambda: ParalFSDPStrategy(min_params=100)),
    Case("fsdp_unsharded", lambda: ParalFSDPStrategy(units=["Linear"], accumulate="unsharded"), world_sizes=(2, 4)),
    Case("fsdp_hybrid", lambda: ParalFSDPStrategy(units=["Linear"], replicate=2), world_sizes=(2, 4)),
    Case(
        "fsdp_hybrid_unsharded",
        lambda: ParalFSDPStrategy(units=["Linear"], replicate=2, accumulate="unsharded"),
        world_sizes=(4,),
    ),
    Case(
        "fsdp_checkpointing",
        lambda: ParalFSDPStrategy(activation_checkpointing=ActivationCheckpointing(units=["Linear"])),
        world_sizes=(2, 4),
    ),
    Case(
        "ddp_checkpointing",
        lambda: ParalDDPStrategy(activation_checkpointing=ActivationCheckpointing(units=["Linear"])),
        world_sizes=(2,),
    ),
    Case("paral_zero1", lambda: "paral_zero1"),
    Case("paral_zero2", lambda: "paral_zero2"),
    Case("paral_zero3", lambda: "paral_zero3"),
    # DeepSpeedCPUAdam rounds differently from torch's AdamW: 8.3e-6 seen.
    Case("paral_zero1_offload", lambda: "paral_zero1_offload", tolerance=1e-4, world_sizes=(2, 4)),
    Case("paral_zero2_offload", lambda: "paral_zero2_offload", tolerance=1e-4, world_sizes=(2, 4)),
    Case("paral_zero3_offload", lambda: "paral_zero3_offload", tolerance=1e-4, world_sizes=(2, 4)),
    Case("paral_zero3_nvme", zero3_nvme, tolerance=1e-4, world_sizes=(2, 4)),
)
BY_LABEL = {case.label: case for case in CASES}


def strategy_of(label: str, **options: Any) -> Any:
    """The case's strategy with options of sampling; `one process` is Lightning's own, without any of ours."""
    if label == "one process":
        return "auto"
    strategy = BY_LABEL[label].strategy()
    if not isinstance(strategy, str):
        return type(strategy)(**options)
    (entry,) = [entry for entry in lightning_paral.registry.STRATEGIES if entry.name == strategy]
    return entry.strategy(**entry.arguments, **options)
