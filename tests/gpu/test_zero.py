"""The ZeRO contracts on CUDA with NCCL: every stage and offload, and fp16, which CPU does not train in."""

from pathlib import Path

import pytest

from tests.contract.cases import BY_LABEL
from tests.gpu.test_ddp import NUM_GPUS, run_ranks

pytestmark = [
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device"),
]
STAGES = ("paral_zero1", "paral_zero2", "paral_zero3")


@pytest.mark.parametrize("label", [label for label in BY_LABEL if label.startswith("paral_zero")])
def test_training_equals_one_process(tmp_path: Path, label: str) -> None:
    for largest_difference in run_ranks("zero_parity", tmp_path, label):
        assert largest_difference <= BY_LABEL[label].tolerance


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", STAGES)
def test_autocast_equals_ddp(tmp_path: Path, strategy: str, precision: str) -> None:
    for expected, losses in zip(
        run_ranks("zero_losses", tmp_path, "paral_ddp", precision),
        run_ranks("zero_losses", tmp_path, strategy, precision),
        strict=True,
    ):
        assert losses == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("overlap", [None, False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_kind_of_window_equals_one_process(tmp_path: Path, stage: int, overlap: bool | None) -> None:
    for largest_difference in run_ranks("zero_windows", tmp_path, str(stage), str(overlap)):
        assert largest_difference <= 1e-4


@pytest.mark.parametrize("strategy", ["paral_zero1_offload", "paral_zero2_offload", "paral_zero3_offload"])
def test_gradients_are_clamped_on_the_host_after_their_copy(tmp_path: Path, strategy: str) -> None:
    for largest_difference in run_ranks("zero_clipped_on_host", tmp_path, strategy):
        assert largest_difference <= 1e-4


@pytest.mark.deepspeed_operators
def test_nvme_needs_no_cuda_toolkit(tmp_path: Path) -> None:
    for largest_difference in run_ranks("zero_on_nvme_without_toolkit", tmp_path, "paral_zero3_nvme", str(tmp_path)):
        assert largest_difference <= BY_LABEL["paral_zero3_nvme"].tolerance
