"""Trainer options of checks by device, and the strategies to check."""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from tests.contract.cases import BY_LABEL
from tests.gpu.crew import Skipped

ONE_RANK = tuple(label for label in BY_LABEL if "hybrid" not in label)
"""Cases that run on one rank; hybrid sharding needs two."""

REPLICAS = 2
"""Replicas of `paral_dp`, which share the GPU."""


def trainer_options(device: str) -> dict[str, Any]:
    """Return the Trainer options for `device`: one process, or one of several nodes with a device each."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    return {"accelerator": accelerator, "devices": 1, "num_nodes": int(os.environ.get("WORLD_SIZE", "1"))}


def options_of(label: str, device: str) -> dict[str, Any]:
    """Return the Trainer options for `device`, with the strategy of a case.

    Raises:
        Skipped: a library that the strategy needs is not installed.
    """
    check_installed(label)
    if label != "paral_dp":
        return trainer_options(device) | {"strategy": BY_LABEL[label].strategy()}
    from lightning_paral import ParalDPStrategy

    devices = [torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")] * REPLICAS
    return trainer_options(device) | {"strategy": ParalDPStrategy(parallel_devices=devices)}


def check_installed(label: str) -> None:
    """Raise `Skipped` if the strategy of a case needs DeepSpeed and it is not installed."""
    if "zero" in label and importlib.util.find_spec("deepspeed") is None:
        raise Skipped("DeepSpeed is not installed; tests/gpu/carry.py downloads the wheels")


def needs_operators(label: str) -> bool:
    """Return whether the strategy of a case needs DeepSpeed's compiled operators."""
    return BY_LABEL[label].needs_operators


def largest_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two models' weights; NaN counts as infinite."""
    if weights.keys() != expected.keys():
        raise AssertionError(f"the weights are {sorted(weights)}, not {sorted(expected)}")
    differences = [(weights[name].cpu().double() - expected[name].cpu().double()).abs().max() for name in expected]
    worst = torch.stack(differences).max().item()
    return worst if worst == worst else float("inf")


def mean_over_replicas(losses: list[float], label: str) -> list[float]:
    """Return the loss of each batch; the replicas of `paral_dp` append to one list."""
    if label != "paral_dp":
        return losses
    return torch.tensor(losses, dtype=torch.float64).view(-1, REPLICAS).mean(dim=1).tolist()


def synchronize(device: str) -> None:
    """Wait for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()
