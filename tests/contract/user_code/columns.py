"""The columns of the contract: the strategies, by what the Trainer is given."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch.strategies import Strategy

from lightning_paral import ParalZeROStrategy


@dataclass(frozen=True)
class Column:
    """A strategy at two ranks, or two devices of one process."""

    label: str
    strategy: Callable[[], str | Strategy]
    on_ranks: bool = True
    always: bool = True
    """Every row runs in it; others name it in `Row.strategies`."""
    themes: tuple[str, ...] = ()
    """Where not empty: only their rows run in it."""
    tolerance: float = 1e-5
    needs_operators: bool = False


def zero3_partitioned() -> ParalZeROStrategy:
    """Stage 3 that partitions the smallest parameters, too; by default those below 100,000 elements stay whole."""
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return ParalZeROStrategy(stage=3, deepspeed_config=config)


COLUMNS = {
    column.label: column
    for column in (
        Column("paral_dp", lambda: "paral_dp", on_ranks=False),
        Column("paral_ddp", lambda: "paral_ddp"),
        # Gradients take another way than under paral_ddp; all else is the same.
        Column("paral_ddp_ring", lambda: "paral_ddp_ring", themes=("gradients", "freezing", "buffers")),
        Column("paral_fsdp", lambda: "paral_fsdp"),
        Column("paral_zero1", lambda: "paral_zero1"),
        Column("paral_zero2", lambda: "paral_zero2"),
        Column("paral_zero3", zero3_partitioned),
        Column("paral_zero3_whole", lambda: "paral_zero3", always=False),
        Column("paral_fsdp_offload", lambda: "paral_fsdp_offload", always=False),
        # DeepSpeedCPUAdam rounds differently from torch's AdamW.
        Column(
            "paral_zero2_offload", lambda: "paral_zero2_offload", always=False, tolerance=1e-4, needs_operators=True
        ),
        Column(
            "paral_zero3_offload", lambda: "paral_zero3_offload", always=False, tolerance=1e-4, needs_operators=True
        ),
    )
}

RANKS = tuple(column.label for column in COLUMNS.values() if column.always and column.on_ranks)
"""The columns with a process per device."""
