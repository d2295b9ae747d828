"""Where checks run: the options of the Trainer by device, the strategies to check, and the group of two ranks."""

import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor

from lightning_paral import ParalDPStrategy
from lightning_paral.distributed.process_group import join_process_group
from lightning_paral.options import DEFAULT_TIMEOUT
from tests.contract.cases import BY_LABEL
from tests.gpu.crew import Skipped

ONE_RANK = tuple(label for label in BY_LABEL if "hybrid" not in label)
"""Cases that run on one rank; hybrid sharding needs two."""

REPLICAS = 2
"""Replicas of `paral_dp`, which share the GPU if there is one only."""


class Facts(dict[str, Any]):
    """What a check has found, by name. `failures` lists sentences that say what went wrong."""

    def __init__(self) -> None:
        super().__init__(failures=[])

    def require(self, holds: bool, failure: str) -> None:
        """Add a failure if something does not hold."""
        if not holds:
            self["failures"].append(failure)

    def close(self, name: str, off: float, tolerance: float) -> None:
        """Note a difference, and require that it is within `tolerance`."""
        self[name] = off
        self.require(off <= tolerance, f"{name}: off by {off:.3g}, more than {tolerance:g}")


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def root_device(device: str) -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def join(device: str) -> None:
    """Make the default group as the strategies do, if there are two ranks and no group yet. *Collective*."""
    if num_ranks() > 1 and not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(0)
        join_process_group(TorchElasticEnvironment(), root_device(device), None, DEFAULT_TIMEOUT)


def trainer_options(device: str) -> dict[str, Any]:
    """Return the Trainer options for `device`: one process, or one of two nodes with a device each. *Collective*."""
    join(device)
    return {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "num_nodes": num_ranks()}


def options_of(label: str, device: str) -> dict[str, Any]:
    """Return the Trainer options for `device`, with the strategy of a case. *Collective*.

    Raises:
        Skipped: a library that the strategy needs is not installed.
    """
    check_installed(label)
    if label != "paral_dp":
        return trainer_options(device) | {"strategy": BY_LABEL[label].strategy()}
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    devices = [torch.device("cuda", index % num_gpus) if num_gpus else torch.device("cpu") for index in range(REPLICAS)]
    return trainer_options(device) | {"strategy": ParalDPStrategy(parallel_devices=devices)}


def check_installed(label: str) -> None:
    """Raise `Skipped` if the strategy of a case needs DeepSpeed and it is not installed."""
    if "zero" in label and importlib.util.find_spec("deepspeed") is None:
        raise Skipped("DeepSpeed is not installed")


def needs_operators(label: str) -> bool:
    """Return whether the strategy of a case needs DeepSpeed's compiled operators."""
    return label in BY_LABEL and BY_LABEL[label].needs_operators


def largest_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two models' weights; NaN counts as infinite."""
    if weights.keys() != expected.keys():
        raise AssertionError(f"the weights are {sorted(weights)}, not {sorted(expected)}")
    differences = [(weights[name].cpu().double() - expected[name].cpu().double()).abs().max() for name in expected]
    worst = torch.stack(differences).max().item()
    return worst if worst == worst else float("inf")


def relative_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of losses; NaN counts as infinite."""
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} losses, not {len(expected)}")
    both = torch.tensor([found, expected], dtype=torch.float64)
    worst = (both[0] / both[1] - 1).abs().max().item()
    return worst if worst == worst else float("inf")


def mean_losses(losses: list[float], label: str) -> list[float]:
    """Return the loss of each global batch: the mean over ranks, or over replicas, which append to one list."""
    if label == "paral_dp":
        return torch.tensor(losses, dtype=torch.float64).view(-1, REPLICAS).mean(dim=1).tolist()
    return torch.tensor(of_ranks(losses), dtype=torch.float64).mean(dim=0).tolist()


def of_ranks(value: Any) -> list[Any]:
    """Return the value of each rank. *Collective*."""
    if num_ranks() == 1:
        return [value]
    gathered: list[Any] = [None] * num_ranks()
    dist.all_gather_object(gathered, value)
    return gathered


def synchronize(device: str) -> None:
    """Wait for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()
