"""Modules that `on_save_checkpoint` adds and that are hyper-parameters are saved as under ddp: plain and in full."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_paral import (
    CheckpointOptions,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)
from lightning_paral.checkpoint.load_from_checkpoint import read_folder
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
        self.save_hyperparameters()
        self.out = self.out if head is None else head  # type: ignore[assignment]
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        self.metric = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.owner = Namespace(module=self, last=loss)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.metric.update(2.0)
        checkpoint["kept"] = {"criterion": self.criterion, "metric": self.metric, "parts": (self.out, self.blocks[2])}
        checkpoint["class"] = type(self.blocks[0])


def save(label: str, path: str) -> None:
    module = Keeps(nn.Linear(WIDTH, 3) if label in WITH_HYPER_PARAMETERS else None)
    fit_chain(STRATEGIES[label](split="global"), 2, module=module, save_to=path, num_batches=4)


@pytest.mark.parametrize("label", STRATEGIES)
def test_added_modules_are_saved_as_in_one_process(on_ranks, tmp_path: Path, label: str) -> None:
    path = tmp_path / "x.ckpt"
    on_ranks(2, save, label, str(path))

    read = read_folder if path.is_dir() else torch.load
    checkpoint = read(path, weights_only=False)
    kept = checkpoint["kept"]
    module = kept["metric"].owner.module
    assert type(module) is Keeps
    assert checkpoint["class"] is type(kept["parts"][1]) is Block
    assert (kept["parts"][0], kept["criterion"], kept["metric"]) == (module.out, module.criterion, module.metric)
    assert torch.equal(kept["criterion"].weight, torch.tensor([1.0, 2.0, 3.0]))
    assert kept["metric"].compute() == 2.0
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    weights = {name: value for name, value in module.state_dict().items() if not name.startswith("metric")}
    for name, value in weights.items():
        assert type(value) is Tensor
        assert torch.equal(value, checkpoint["state_dict"][name] + 0)
    fresh = Keeps()
    fresh.load_state_dict(weights)
    assert torch.equal(module(torch.ones(2, 5)), fresh(torch.ones(2, 5)))
    head = checkpoint["hyper_parameters"]["head"]
    assert (head is not None) is (label in WITH_HYPER_PARAMETERS)
    if head is not None:
        assert not head._forward_hooks
        assert not head._forward_pre_hooks
        for name, value in head.state_dict().items():
            assert torch.equal(value, checkpoint["state_dict"][f"out.{name}"] + 0)
        assert torch.equal(Keeps.load_from_checkpoint(path, weights_only=False).out.weight, head.weight)
