"""Writes to parameters in hooks and steps under ZeRO change the trained and saved values, or are refused."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_paral import ParalZeROStrategy
from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import peek
from lightning_paral.engines.zero.state.engine_shards import EngineShards
from lightning_paral.errors import ConfigurationError
from tests.contract.cases import MAIN
from tests.models.regression import FEATURES, Regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

NUM_STEPS = 5


def partitioned() -> ParalZeROStrategy:
    """Return a stage 3 strategy that partitions parameters of any size."""
    return ParalZeROStrategy(stage=3, deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}})


STRATEGIES: dict[str, Callable[[], Any]] = {
    **{case.label: case.strategy for case in MAIN if case.needs_deepspeed},
    "partitioned": partitioned,
}


class Bootstrapped(Regression):
    """Averages a target network through aliases kept since the first step, prunes weights, and draws some again."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.hidden).requires_grad_(False)
        self.aliases: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        consistency = (self.hidden(batch[0]) - self.target(batch[0])).square().mean()
        penalty = 1e-2 * self.out.weight.norm() + 1e-3 * sum(p.square().sum() for p in self.parameters())
        return loss + consistency + penalty

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.aliases:
            self.aliases = [self.target.weight.data, self.target.bias.detach()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.out.weight[0, :3] = 0.0
        assert [tuple(p.shape) for p in optimizer.param_groups[0]["params"]] == [
            tuple(p.shape) for p in self.parameters()
        ]

    def on_train_batch_end(self, *_: Any) -> None:
        for alias, online in zip(self.aliases, self.hidden.parameters(), strict=True):
            alias.mul_(0.8).add_(0.2 * online.data)
        for group in self.optimizers().param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.3, 0.3)
        self.hidden.bias.data = self.hidden.bias.data - self.hidden.bias.data.mean()


def fit_bootstrapped(num_ranks: int, strategy: Any = "auto", **options: Any) -> Any:
    torch.manual_seed(3)
    model = Bootstrapped()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, **options)
    trainer.fit(model, regression_data(NUM_STEPS, num_ranks))
    return model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}


def fit_on_rank(label: str, num_ranks: int) -> Any:
    return fit_bootstrapped(num_ranks, STRATEGIES[label]())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("label", STRATEGIES)
def test_writes_from_hooks_by_aliases_and_groups_equal_those_of_one_process(
    on_ranks, label: str, num_ranks: int
) -> None:
    assert_same_fit(on_ranks(num_ranks, fit_on_rank, label, num_ranks), fit_bootstrapped(1), 2e-5)


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


def fit_in_bf16_with_average(label: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Bootstrapped()
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
    for first, second in on_ranks(2, fit_in_bf16_with_average, label):
        assert (first.bfloat16().float() != first).any()  # master weights have more precision
        moved = (second - first).abs()
        assert moved[0].max() < 0.05  # one step of AdamW with lr=1e-2
        assert ((second[1] - 0.5).abs() < 0.05).all()


def fit_plainly(label: str) -> int:
    taken_over = 0
    adopt = EngineShards.write_full_values

    def count(self: EngineShards, written: list[Any]) -> None:
        nonlocal taken_over
        taken_over += len(written)
        adopt(self, written)

    EngineShards.write_full_values = count  # type: ignore[method-assign]
    try:
        model = Regression()
        quiet_trainer(max_epochs=1, devices=2, strategy=STRATEGIES[label]()).fit(model, regression_data(3, 2))
    finally:
        EngineShards.write_full_values = adopt  # type: ignore[method-assign]
    assert all(type(parameter) is Parameter for parameter in model.parameters())
    return taken_over


@pytest.mark.parametrize("label", STRATEGIES)
def test_fit_without_writes_copies_nothing(on_ranks, label: str) -> None:
    assert on_ranks(2, fit_plainly, label) == [0, 0]


class Reshaping(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.out.weight.data = torch.zeros(3, 32)


class Halving(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.out.weight.data = self.out.weight.data.half()


class CopyingModules(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.twin = copy.deepcopy(self.out)


@pytest.mark.parametrize("label", STRATEGIES)
@pytest.mark.parametrize("kind", [Reshaping, Halving])
def test_values_of_another_shape_or_dtype_are_refused_by_name(label: str, kind: type[Regression]) -> None:
    with pytest.raises(ConfigurationError, match=r"'out.weight' has shape \(2, 32\).*was given values of"):
        quiet_trainer(max_epochs=1, devices=1, strategy=STRATEGIES[label]()).fit(kind(), regression_data(2, 1))


def test_copying_a_module_at_stage_3_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'out.weight' was copied, by copy\.deepcopy"):
        quiet_trainer(max_epochs=1, devices=1, strategy=partitioned()).fit(CopyingModules(), regression_data(2, 1))


class ReadingInEvaluation(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.norms.append(float(self.hidden.weight.norm()))

    def on_validation_epoch_end(self) -> None:
        self.norms.append(float(torch.stack([p.norm() for p in self.parameters()]).norm()))
        self.out.bias.data.zero_()
        self.norms.append(sum(p.numel() for p in self.parameters()))


def validate(label: str) -> Any:
    torch.manual_seed(3)
    model = ReadingInEvaluation()
    expected = [float(model.hidden.weight.norm()), float(nn.utils.parameters_to_vector(model.parameters()).norm())]
    trainer = quiet_trainer(devices=2, strategy=STRATEGIES[label]())
    trainer.validate(model, regression_data(1, 2), verbose=False)
    return model.norms, expected, model.out.bias.tolist()


@pytest.mark.parametrize("label", STRATEGIES)
def test_hooks_in_evaluation_read_and_write_full_parameters(on_ranks, label: str) -> None:
    for norms, (of_hidden, of_all), bias in on_ranks(2, validate, label):
        assert norms == pytest.approx([of_hidden, of_all, FEATURES * 32 + 32 + 64 + 2])
        assert bias == [0.0, 0.0]


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


STRATEGIES_WITH_OFFLOAD = {"paral_zero2_offload": lambda: "paral_zero2_offload", "nvme": offloaded}


def fit_offloaded(label: str) -> Any:
    return fit_bootstrapped(2, STRATEGIES_WITH_OFFLOAD[label]())


@pytest.mark.deepspeed_operators
@pytest.mark.parametrize("label", STRATEGIES_WITH_OFFLOAD)
def test_writes_reach_offloaded_weights(on_ranks, label: str) -> None:
    assert_same_fit(on_ranks(2, fit_offloaded, label), fit_bootstrapped(1), 1e-4)
