"""The ZeRO contracts on CUDA with NCCL: every stage and offload, and fp16, which CPU does not train in."""

from pathlib import Path

import pytest

from tests.contract.cases import BY_LABEL
from tests.gpu.test_ddp import NUM_GPUS, run_ranks

pytestmark = [
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device"),
    pytest.mark.usefixtures("deepspeed_operators"),
]
STAGES = ("paral_zero1", "paral_zero2", "paral_zero3")


@pytest.mark.parametrize("label", [label for label in BY_LABEL if label.startswith("paral_zero")])
def test_training_equals_one_process(tmp_path: Path, label: str) -> None:
    for largest_difference in run_ranks("zero_parity", tmp_path, label):
        assert largest_difference <= BY_LABEL[label].tolerance


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", STAGES)
def test_autocast_equals_that_of_ddp(tmp_path: Path, strategy: str, precision: str) -> None:
    for expected, losses in zip(
        run_ranks("zero_losses", tmp_path, "paral_ddp", precision),
        run_ranks("zero_losses", tmp_path, strategy, precision),
        strict=True,
    ):
        assert losses == pytest.approx(expected, rel=5e-3)
