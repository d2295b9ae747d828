"""Every public feature of Lightning works under every strategy as in one process or as under `ddp`, or is refused."""

import inspect
import re

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, profilers
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.contract.lightning_api.table import TABLE
from tests.contract.tables.checks import assert_as_on_page, assert_complete, parameters
from tests.contract.user_code.table import TABLE as USER_CODE

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


@pytest.mark.parametrize(("row", "column"), parameters(TABLE))
def test_feature_works_as_in_one_process_or_is_refused(row: str, column: str, rank_pool: RankPool) -> None:
    assert_as_on_page(TABLE, row, column, rank_pool)


def test_table_has_every_cell() -> None:
    assert_complete(TABLE)


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
    of_user_code = (row.text for row in USER_CODE.rows.values())
    covered = " ".join([*of_user_code, *(f"{row.label} {' '.join(row.covers)}" for row in TABLE.rows.values())])
    words = set(re.findall(r"\w+", covered))

    missing = [name for name in names if not name.startswith("_") and name not in words and name not in NOT_COVERED]

    assert not missing
