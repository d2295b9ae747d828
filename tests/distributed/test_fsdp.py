"""What `ParalFSDPStrategy` does beside training as one process does."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_paral import ConfigurationError, ParalFSDPStrategy
from tests.fsdp_models import PENALISED, Block, OnTheModule, Tied
from tests.models import fit_regression, quiet_trainer, regression_data
from tests.zero_models import LENGTH, VOCABULARY, Fitted, assert_same_fit, fit, token_loader

NUM_BATCHES = 4


class Watched(OnTheModule):
    """Evaluates, predicts, and is called from hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        tokens = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            self.seen += [self(tokens).sum().item(), self.embedding(tokens).sum().item()]


def everything(num_ranks: int, strategy: Any) -> list[Any]:
    torch.manual_seed(5)
    model = Watched()
    parameters, hooks = dict(model.named_parameters()), len(model._forward_hooks)
    results: list[Any] = []
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, gradient_clip_val=0.5)
    loader = token_loader(NUM_BATCHES, num_ranks)
    for name in ("validate", "fit", "predict", "test", "fit", "validate"):
        if name == "predict":
            results.append(torch.cat(trainer.predict(model, loader)).mean().item())
        elif name == "fit":
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(model, loader, loader)
        else:
            results.append(getattr(trainer, name)(model, loader, verbose=False)[0]["loss"])
        assert type(model) is Watched
        assert dict(model.named_parameters()) == parameters or num_ranks == 0
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
        assert len(model._forward_hooks) == hooks
        assert not [attribute for attribute in vars(model) if "fsdp" in attribute]
    return [*results, *model.seen]


def everything_on_rank() -> list[Any]:
    return everything(2, "paral_fsdp")


def test_all_trainer_functions_run_in_any_order_and_give_the_module_back(on_ranks) -> None:
    expected = everything(1, "auto")

    ranks = on_ranks(2, everything_on_rank)

    mean = [sum(values) / 2 for values in zip(*ranks, strict=True)]
    assert mean == pytest.approx(expected, rel=1e-5)
