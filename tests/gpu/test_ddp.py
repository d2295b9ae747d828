"""The DDP contracts on CUDA with NCCL: as many ranks as there are GPUs, at most four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NUM_GPUS = min(torch.cuda.device_count(), 4)
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device")
ALGORITHMS = ("auto", "ring", "reduce_broadcast", "all_to_all")


def run_ranks(check: str, folder: Path, *arguments: str) -> list[object]:
    """Run a check of tests/gpu/checks.py on every GPU under torchrun; return what each rank reports."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_GPUS}"]
    command = [*launcher, "-m", "tests.gpu.checks", check, str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_GPUS)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_equals_one_process(tmp_path: Path, algorithm: str) -> None:
    for largest_difference in run_ranks("parity", tmp_path, algorithm):
        assert largest_difference <= 1e-5


@pytest.mark.parametrize("algorithm", ["ring", "native", "reduce_broadcast", "all_to_all"])
def test_all_reduce_is_the_sum_and_identical_on_all_ranks(tmp_path: Path, algorithm: str) -> None:
    for largest_error, identical in run_ranks("all_reduce", tmp_path, algorithm):
        assert largest_error <= 1e-5
        assert identical


def test_cpu_tensors_and_objects_have_a_path(tmp_path: Path) -> None:
    for mean_on_cpu, gathered in run_ranks("cpu_path", tmp_path):
        assert mean_on_cpu == (NUM_GPUS - 1) / 2
        assert gathered == list(range(NUM_GPUS))
