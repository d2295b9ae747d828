"""Losses and metrics in a checkpoint are saved as in one process; networks too, or refused by name."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_paral import (
    CheckpointError,
    CheckpointOptions,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)
from lightning_paral.checkpoint.load_from_checkpoint import read_folder
from lightning_paral.checkpoint.state.saved_modules import fault_of_entries
from tests.models.chain import WIDTH, Chain, fit_chain

SHARDING: dict[str, Any] = {
    "fsdp": partial(ParalFSDPStrategy, units=["Block"]),
    "fsdp, async": partial(ParalFSDPStrategy, checkpoint=CheckpointOptions("full", async_save=True)),
    "tp": partial(ParalFSDPStrategy, tensor_parallel=2),
    "zero2": partial(ParalZeROStrategy, stage=2),
    "zero3": partial(ParalZeROStrategy, stage=3),
    "pp": partial(ParalPipelineStrategy, checkpoint="full"),
}
STRATEGIES: dict[str, Any] = {"ddp": partial(ParalDDPStrategy, find_unused_parameters=True), **SHARDING}


class Keeps(Chain):
    """Has modules among its hyper-parameters, and adds the same ones to its checkpoints."""

    def __init__(self, criterion: nn.Module | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.criterion, self.metric = criterion, MeanMetric()
        self.out = self.out if head is None else head  # type: ignore[assignment]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.metric.update(2.0)
        checkpoint["kept"] = [self.criterion, self.metric]


def save(label: str, path: str, with_head: bool) -> str:
    """Fit and save; return the error, if there is one."""
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    module = Keeps(weighted, nn.Linear(WIDTH, 3) if with_head else None)
    try:
        fit_chain(STRATEGIES[label](split="global"), 2, module=module, save_to=path, num_batches=4)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("label", [label for label in STRATEGIES if label != "zero3"])
def test_losses_and_metrics_are_saved(on_ranks, tmp_path: Path, label: str) -> None:
    path = tmp_path / "x.ckpt"
    assert on_ranks(2, save, label, str(path), False) == ["", ""]
    checkpoint = (read_folder if path.is_dir() else torch.load)(path, weights_only=False)
    criterion, metric = checkpoint["kept"]
    assert criterion is checkpoint["hyper_parameters"]["criterion"]
    assert torch.equal(criterion.weight, torch.tensor([1.0, 2.0, 3.0]))
    assert metric.compute() == 2.0


def test_networks_are_saved_under_ddp(on_ranks, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    on_ranks(2, save, "ddp", str(path), True)
    checkpoint = torch.load(path, weights_only=False)
    head = checkpoint["hyper_parameters"]["head"]
    for name, value in head.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"out.{name}"])
    assert torch.equal(Keeps.load_from_checkpoint(path, weights_only=False).out.weight, head.weight)


@pytest.mark.parametrize("label", SHARDING)
def test_networks_are_refused_by_name(on_ranks, tmp_path: Path, label: str) -> None:
    refused, other = ("criterion", "paral_fsdp") if label == "zero3" else ("head", "paral_ddp")  # hooks on every module
    for message in on_ranks(2, save, label, str(tmp_path / "x.ckpt"), True):
        assert f"The hyper-parameter {refused!r} refers to " in message
        assert f"self.save_hyperparameters(ignore=[{refused!r}]), or use {other}." in message
    assert not (tmp_path / "x.ckpt").exists()


def test_references_inside_other_objects_are_found() -> None:
    module, metric = Chain(), MeanMetric()
    assert not fault_of_entries({"metric": metric, "loss": [nn.MSELoss()], "state_dict": module.state_dict()}, module)
    metric.owner = Namespace(module=module)
    fault = fault_of_entries({"kept": {"metric": metric}}, module)
    assert fault.startswith("The entry 'kept' of the checkpoint refers to Chain, whose parameters")
