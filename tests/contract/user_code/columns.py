"""The columns of the table: the strategies under test, on two ranks or on two devices of one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch.nn import Module

from lightning_paral import (
    ActivationCheckpointing,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
)
from lightning_paral.engines.tensor import plan
from lightning_paral.engines.tensor.shapes import Layer, plain_chains
from tests.contract.case import StrategyCase
from tests.contract.cases import CASES, OWN_CASES


@dataclass(frozen=True)
class Column:
    """A strategy on two ranks, or on two devices of one process."""

    label: str
    strategy: Callable[[], str | Strategy]
    on_ranks: bool = True
    always: bool = True
    """Whether every row runs in the column. Otherwise, only rows that name it."""
    themes: tuple[str, ...] = ()
    """If not empty, only rows of these themes run in the column."""
    tolerance: float = 1e-5
    ranks_per_sample: int = 1
    """The number of ranks that draw the same samples."""
    names: str = ""
    """What refusals of the column may name besides `Row.names`, because it has other reasons."""
    documented: bool = True
    """Whether the page has the column. Strategies of other packages are not on it: their cells must be allowed."""


MANUAL = r"\w+ uses manual optimization"
PARTITIONED = r"'[\w.]+'(, or a tensor that has or had the same memory,)? was (used outside|written to|copied)"
NAMES = {"zero3_partitioned": "paral_zero3", "paral_zero3": "paral_zero3_whole"}
"""Label of a case -> label of its column. The column `paral_zero3` partitions even the smallest parameters."""


def column_of(case: StrategyCase) -> Column:
    themes = case.themes_of_user_code
    return Column(
        NAMES.get(case.label, case.label),
        case.strategy,
        on_ranks=case.has_ranks,
        always=themes != "named",
        themes=themes if isinstance(themes, tuple) else (),
        tolerance=case.tolerance,
        names=MANUAL if case.label == "paral_dp" else PARTITIONED if "zero3" in case.label else "",
        documented=case in OWN_CASES,
    )


class SplitsEveryLayer(ParalFSDPStrategy):
    """Splits between two tensor ranks also layers that have no plain shape, and small embeddings."""

    def __init__(self) -> None:
        super().__init__(tensor_parallel=2)

    def setup(self, trainer: Trainer) -> None:
        least, plan.MIN_ROWS = plan.MIN_ROWS, 1
        shapes, plan.plain_chains = plan.plain_chains, plain_and_single
        try:
            super().setup(trainer)
        finally:
            plan.MIN_ROWS, plan.plain_chains = least, shapes


def plain_and_single(module: Module, layers: Mapping[str, Layer]) -> list[dict[str, str]]:
    """Return the plain chains, and each linear layer as one that splits its output features."""
    linear = [name for name, layer in layers.items() if not layer.is_embedding]
    return [*plain_chains(module, layers), *({name: "colwise"} for name in linear)]


_columns = [column_of(case) for case in CASES if case.themes_of_user_code and case.sizes_among(2)]
_columns.append(Column("paral_tp", SplitsEveryLayer, ranks_per_sample=2))
_columns.append(
    Column(
        "paral_pp",
        partial(ParalPipelineStrategy, micro_batches=2),
        ranks_per_sample=2,
        names=rf"blocks\.\d|layers\.\d|embedding\.|{MANUAL}|\w+\.training_step"
        r"|module cannot be copied|No repeated blocks were found in \w+|is a BatchNorm",
    )
)
_columns.sort(key=lambda column: (not column.always, "offload" in column.label))
COLUMNS = {column.label: column for column in _columns}

OPTIONS = {
    "ddp_find_unused": partial(ParalDDPStrategy, find_unused_parameters=True),
    "ddp_static_graph": partial(ParalDDPStrategy, static_graph=True),
    "ddp_checkpointing": partial(ParalDDPStrategy, activation_checkpointing=ActivationCheckpointing(units=["Linear"])),
    "fsdp_linear": partial(ParalFSDPStrategy, units=["Linear"]),
    "fsdp_filters": partial(ParalFSDPStrategy, units=["Filter"]),
    "fsdp_unsharded": partial(ParalFSDPStrategy, units=["Linear"], accumulate="unsharded"),
}
"""Options with which tests/contract/test_user_code_options.py runs some rows."""
RUNNABLE = COLUMNS | {label: Column(label, strategy) for label, strategy in OPTIONS.items()}

RANKS = tuple(column.label for column in COLUMNS.values() if column.always and column.on_ranks)
"""The columns with a process per device."""
