"""Modules that `on_save_checkpoint` adds and that are hyper-parameters are saved as under ddp: plain and in full."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_paral import (
    CheckpointError,
    CheckpointOptions,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)
from lightning_paral.checkpoint import read_folder
from tests.models.chain import WIDTH, Block, Chain, fit_chain

STRATEGIES: dict[str, Any] = {
    "ddp": partial(ParalDDPStrategy, find_unused_parameters=True),
    "fsdp": partial(ParalFSDPStrategy, units=["Block"]),
    "fsdp, async": partial(ParalFSDPStrategy, checkpoint=CheckpointOptions("full", async_save=True)),
    "tp": partial(ParalFSDPStrategy, tensor_parallel=2),
    "zero2": partial(ParalZeROStrategy, stage=2),
    "zero3": partial(ParalZeROStrategy, stage=3),
    "pp": partial(ParalPipelineStrategy, checkpoint="full"),
}


WITH_HYPER_PARAMETERS = ("ddp", "fsdp", "fsdp, async", "zero2")


class Keeps(Chain):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.never.requires_grad_(False)  # ZeRO trains no parameters without gradients
        self.save_hyperparameters()
        self.out = self.out if head is None else head  # type: ignore[assignment]
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        self.metric = MeanMetric()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.metric.update(2.0)
        checkpoint["kept"] = {"criterion": self.criterion, "metric": self.metric, "parts": (self.out, self.blocks[2])}


def save(label: str, path: str, make: Callable[[], Chain]) -> None:
    fit_chain(STRATEGIES[label](split="global"), 2, module=make, save_to=path, num_batches=4)


@pytest.mark.parametrize("label", STRATEGIES)
def test_added_modules_are_saved_as_in_one_process(on_ranks, tmp_path: Path, label: str) -> None:
    path = tmp_path / "x.ckpt"
    head = nn.Linear(WIDTH, 3) if label in WITH_HYPER_PARAMETERS else None
    on_ranks(2, save, label, str(path), partial(Keeps, head))

    read = read_folder if path.is_dir() else torch.load
    checkpoint = read(path, weights_only=False)
    kept = checkpoint["kept"]
    out, block = kept["parts"]
    assert (type(out), type(block), type(kept["criterion"])) == (nn.Linear, Block, nn.CrossEntropyLoss)
    assert torch.equal(kept["criterion"].weight, torch.tensor([1.0, 2.0, 3.0]))
    assert kept["metric"].compute() == 2.0
    assert block(torch.ones(2, WIDTH)).isfinite().all()
    for prefix, module in {"out": out, "blocks.2": block}.items():
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        for name, value in module.state_dict().items():
            assert type(value) is Tensor
            assert torch.equal(value, checkpoint["state_dict"][f"{prefix}.{name}"] + 0)
    head = checkpoint["hyper_parameters"]["head"]
    assert (head is not None) is (label in WITH_HYPER_PARAMETERS)
    if head is not None:
        assert not head._forward_hooks
        assert not head._forward_pre_hooks
        for name, value in head.state_dict().items():
            assert torch.equal(value, checkpoint["state_dict"][f"out.{name}"] + 0)
        assert torch.equal(Keeps.load_from_checkpoint(path, weights_only=False).out.weight, head.weight)


class Refers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.never.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = Namespace(part=self.blocks[2])


def save_refused(label: str, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"x.ckpt failed on rank 0 of 2: .*(Can't pickle|full_)"):
        save(label, path, Refers)


@pytest.mark.parametrize("label", ["fsdp", "tp", "zero3", "pp"])
def test_objects_that_refer_to_sharded_modules_are_refused(on_ranks, tmp_path: Path, label: str) -> None:
    on_ranks(2, save_refused, label, str(tmp_path / "x.ckpt"))
