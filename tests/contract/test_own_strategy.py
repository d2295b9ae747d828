"""A strategy from another folder passes the contracts with one row in the table of cases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

from lightning_paral import ActivationCheckpointing
from tests.contract.cases import MORE_CASES
from tests.models.regression import FEATURES, Regression, regression_data
from tests.running import quiet_trainer

ROOT = Path(__file__).parents[2]
ROW = """
import flat_all_reduce
from tests.contract.case import StrategyCase

CASES = (StrategyCase(label="flat_all_reduce", world_sizes=(1, 2), themes_of_user_code=("freezing",)),)
"""
SUITES = (
    "tests/contract/test_parity.py",
    "tests/contract/test_sampling.py",
    "tests/contract/test_lightning_api.py",
    "tests/contract/test_user_code.py",
    "tests/distributed/checkpoint/test_matrix.py",
)
CONTRACTS = "flat_all_reduce and not test_feature and not test_user_code_equals or torch-paral_fsdp-2 or test_table_has"
ROWS = "flat_all_reduce and (max_steps or during)"
SOME = (
    "test_training_equals_one_process[flat_all_reduce-2-3]",
    "test_evaluation_equals_one_process[flat_all_reduce-2-batch]",
    "test_training_on_global_batches_equals_one_process[flat_all_reduce-2]",
    "test_resuming_inside_an_epoch_equals_the_uninterrupted_run[flat_all_reduce-batch]",
    "test_resuming_continues_as_the_uninterrupted_run[torch-flat_all_reduce-2]",
    "test_resuming_continues_as_the_uninterrupted_run[torch-paral_fsdp-2]",
    "test_feature_works_as_in_one_process_or_is_refused[`max_steps=3`-flat_all_reduce]",
    "test_user_code_equals_one_process_or_is_refused[freezing during the run-flat_all_reduce]",
)


class CountedLinear(nn.Linear):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


def count_forward_passes(activation_checkpointing: ActivationCheckpointing | None) -> int:
    """Return how often a layer runs in one training step under the example strategy."""
    from examples.flat_all_reduce import FlatAllReduceStrategy

    model = Regression()
    model.hidden = CountedLinear(FEATURES, 32)
    strategy = FlatAllReduceStrategy(activation_checkpointing=activation_checkpointing)
    quiet_trainer(strategy=strategy, devices=2, max_epochs=1).fit(model, regression_data(1, 2))
    return model.hidden.num_calls


def test_activation_checkpointing_is_applied_without_a_line_in_the_strategy(on_ranks) -> None:
    assert on_ranks(2, count_forward_passes, None) == [1, 1]
    assert on_ranks(2, count_forward_passes, ActivationCheckpointing(units=["CountedLinear"])) == [2, 2]


@pytest.mark.lane("full")
def test_strategy_from_another_folder_passes_the_contracts(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "flat_all_reduce.py", tmp_path)
    (tmp_path / "cases_of_mine.py").write_text(ROW)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {MORE_CASES: "cases_of_mine", "PYTHONPATH": paths}
    # FSDP also resumes from a checkpoint of this strategy. Of the tables, one row each is enough.
    chosen = ["-m", "not deepspeed_operators", "-k", f"({CONTRACTS}) or ({ROWS})"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *SUITES, *chosen]

    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    for name in SOME:
        assert f"{name} PASSED" in ended.stdout, name
