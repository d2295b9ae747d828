"""Writes to parameters under ZeRO: what is read, saved and copied, master weights, evaluation, NVMe."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalZeROStrategy
from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import peek
from tests.contract.cases import MAIN
from tests.models.regression import Regression, fit, regression_data
from tests.running import assert_same_fit, quiet_trainer


def partitioned() -> ParalZeROStrategy:
    """Return a stage 3 strategy that partitions parameters of any size."""
    return ParalZeROStrategy(stage=3, deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}})


STRATEGIES: dict[str, Callable[[], Any]] = {
    **{case.label: case.strategy for case in MAIN if case.needs_deepspeed},
    "partitioned": partitioned,
}


class Averaged(Regression):
    """Changes weights after the last step, and saves."""

    path = ""

    def on_train_epoch_end(self) -> None:
        self.out.bias.data.fill_(0.125)
        with torch.no_grad():
            self.hidden.weight.mul_(2)
        self.before = {name: self.trainer.strategy.full_parameter(p) for name, p in self.named_parameters()}
        self.trainer.save_checkpoint(self.path)


def save_what_was_written(label: str, folder: str) -> Any:
    torch.manual_seed(3)
    model = Averaged()
    model.path = f"{folder}/saved.ckpt"
    quiet_trainer(max_epochs=1, devices=2, strategy=STRATEGIES[label]()).fit(model, regression_data(2, 2))
    _, checkpoint = peek(model.path)
    saved = {name: materialize(value) for name, value in checkpoint["state_dict"].items()}
    return model.before, saved, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("label", STRATEGIES)
def test_last_write_is_read_saved_and_kept(on_ranks, label: str, tmp_path: Path) -> None:
    for read, saved, given_back in on_ranks(2, save_what_was_written, label, str(tmp_path)):
        assert (saved["out.bias"] == 0.125).all()
        for name, value in read.items():
            assert torch.equal(value, saved[name]), name
            assert torch.equal(value, given_back[name]), name


def fit_in_bf16(label: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Regression()
    seen = []

    def look_at_masters(*_: Any) -> None:
        seen.append(model.trainer.strategy.full_parameter(model.out.weight))
        with torch.no_grad():
            model.out.weight[1] = 0.5

    model.on_train_batch_end = look_at_masters  # type: ignore[method-assign]
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=STRATEGIES[label](), precision="bf16-true")
    trainer.fit(model, regression_data(2, 2))
    return seen


@pytest.mark.parametrize("label", STRATEGIES)
def test_master_weights_change_only_where_weights_were_written(on_ranks, label: str) -> None:
    for first, second in on_ranks(2, fit_in_bf16, label):
        assert (first.bfloat16().float() != first).any()  # master weights have more precision
        moved = (second - first).abs()
        assert moved[0].max() < 0.05  # one step of AdamW with lr=1e-2
        assert ((second[1] - 0.5).abs() < 0.05).all()


def offloaded() -> Any:
    from lightning_paral import Offload

    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme")
    folder.mkdir(exist_ok=True)
    nvme = Offload("nvme", path=folder, buffer_numel=10_000)
    return ParalZeROStrategy(
        stage=3,
        offload_optimizer=nvme,
        offload_parameters=nvme,
        deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    )


class Written(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.out.weight[0, :3] = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


def fit_on_nvme() -> Any:
    return fit(Written, 5, 2, strategy=offloaded())


@pytest.mark.deepspeed_operators
def test_writes_reach_weights_on_nvme(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_on_nvme), fit(Written, 5, 1), 1e-4)
