"""A strategy of somebody else, from a folder of theirs, passes the contracts with one row in the table of cases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from torch import Tensor, nn

from lightning_paral import ActivationCheckpointing
from tests.contract.cases import MORE_CASES
from tests.models.regression import FEATURES, Regression, regression_data
from tests.running import quiet_trainer

ROOT = Path(__file__).parents[2]
ROW = """
import flat_all_reduce
from tests.contract.case import StrategyCase

CASES = (StrategyCase(label="flat_all_reduce", world_sizes=(1, 2)),)
"""
SUITES = (
    "tests/contract/test_parity.py",
    "tests/contract/test_buffers.py",
    "tests/contract/test_sampling.py",
    "tests/distributed/checkpoint/test_matrix.py",
)
SOME = (
    "test_training_equals_one_process[flat_all_reduce-2-3]",
    "test_validation_in_a_fit_equals_one_process_with_the_final_weights_and_buffers[flat_all_reduce-2]",
    "test_evaluation_equals_one_process[flat_all_reduce-batch-3]",
    "test_training_on_global_batches_is_the_same_run_at_any_world_size[flat_all_reduce]",
    "test_resuming_inside_an_epoch_equals_the_uninterrupted_run[flat_all_reduce-batch]",
    "test_resuming_goes_on_with_the_losses_of_the_uninterrupted_run[torch-flat_all_reduce-2]",
    "test_resuming_goes_on_with_the_losses_of_the_uninterrupted_run[torch-paral_fsdp-2]",
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


def test_strategy_from_another_folder_passes_the_contracts(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "flat_all_reduce.py", tmp_path)
    (tmp_path / "cases_of_mine.py").write_text(ROW)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {MORE_CASES: "cases_of_mine", "PYTHONPATH": paths}
    # Among the checkpoints that FSDP resumes from here is one of this strategy.
    chosen = ["-m", "not deepspeed", "-k", "flat_all_reduce or torch-paral_fsdp-2"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *SUITES, *chosen]

    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    for name in SOME:
        assert f"{name} PASSED" in ended.stdout, name
