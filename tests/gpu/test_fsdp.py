"""The FSDP contracts on CUDA with NCCL: as many ranks as there are GPUs, at most four."""

from pathlib import Path

import pytest

from tests.gpu.test_ddp import NUM_GPUS, run_ranks
from tests.models.blocks import MODULES

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device")


@pytest.mark.parametrize("name", MODULES)
def test_module_trains_as_in_one_process(tmp_path: Path, name: str) -> None:
    for largest_difference in run_ranks("fsdp_parity", tmp_path, name):
        assert largest_difference <= 1e-4


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 1e-2), ("bf16-true", 3e-2), ("16-mixed", 1e-2)])
def test_low_precision_is_close_to_ddp(tmp_path: Path, precision: str, tolerance: float) -> None:
    for ours, theirs in run_ranks("fsdp_precision", tmp_path, precision):
        assert ours == pytest.approx(theirs, rel=tolerance)


def test_activation_checkpointing_does_not_change_results(tmp_path: Path) -> None:
    for largest_difference in run_ranks("fsdp_checkpointing", tmp_path):
        assert largest_difference <= 1e-5
