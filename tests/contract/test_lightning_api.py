"""Every public feature of Lightning works under every strategy as in one process or as under `ddp`, or is refused."""

import inspect
import re

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, profilers
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.contract.lightning_api import table
from tests.contract.lightning_api.outcomes import cells, outcome
from tests.contract.lightning_api.rows import DOCUMENTED, ROWS
from tests.contract.user_code.table import OPEN, word
from tests.rank_pool import RankPool

ADVICE = "If this is intended, write docs/lightning.md again: python -m tests.contract.lightning_api --write"
NOT_COVERED = {
    "configure_sharded_model": "replaced by configure_model in Lightning",
    "XLAProfiler": "needs a TPU",
    "Profiler": "the base class of profilers that have rows",
    "to_onnx": "needs onnx; to_torchscript has a row",
    "to_tensorrt": "needs TensorRT",
    "callbacks": "each has a row",
    "forward": "in every row",
    "validation_step": "in most rows",
    "toggled_optimizer": "toggle_optimizer has a row",
    "untoggle_optimizer": "toggle_optimizer has a row",
}
"""Public name without a row -> the reason."""


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, str], tuple[str, str]]:
    return table.read()


@pytest.mark.parametrize(("row", "column"), cells())
def test_feature_works_as_in_one_process_or_is_refused(row: str, column: str, said, rank_pool: RankPool) -> None:
    found = outcome(row, column, rank_pool)

    assert found.is_allowed, f"{found.kind}: {found.reason}\n{found.detail}"
    if column in DOCUMENTED:
        assert (word(found), found.reason) == said[row, column], ADVICE


def test_table_has_every_cell(said) -> None:
    assert said.keys() == {(row, column) for row, column in cells() if column in DOCUMENTED}
    assert OPEN not in {kind for kind, _ in said.values()}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(inspect.signature(Trainer).parameters), id="arguments of the Trainer"),
        pytest.param(callbacks.__all__, id="callbacks"),
        pytest.param(profilers.__all__, id="profilers"),
        pytest.param([*vars(ModelHooks), *vars(DataHooks), *vars(CheckpointHooks)], id="hooks"),
        pytest.param([name for name in vars(Callback) if name != "state_key"], id="hooks of callbacks"),
        pytest.param([name for name, kind in vars(LightningModule).items() if inspect.isfunction(kind)], id="methods"),
    ],
)
def test_every_public_name_has_a_row(names: list[str]) -> None:
    covered = " ".join(f"{row.label} {' '.join(row.covers)}" for row in ROWS.values())
    words = set(re.findall(r"\w+", covered))

    missing = [name for name in names if not name.startswith("_") and name not in words and name not in NOT_COVERED]

    assert not missing
