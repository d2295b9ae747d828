"""`ParalDPStrategy` on several devices, which are threads on the CPU here."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ConfigurationError
from tests.models.regression import FEATURES
from tests.running import quiet_trainer
from tests.unit.cli.test_commands import ROOT
from tests.unit.cli.test_commands import run as run_cli

NUM_SAMPLES, BATCH_SIZE = 22, 5  # the last batch has 2 samples, fewer than devices


def dp_trainer(devices: int = 3, **options: Any) -> Any:
    return quiet_trainer(strategy="paral_dp", devices=devices, **({"max_epochs": 1} | options))


def samples() -> DataLoader[Any]:
    inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1)), batch_size=BATCH_SIZE)


def one_process_and_dp(make: Any, run: Any, **options: Any) -> list[Any]:
    """Return the results of `run(trainer, module)` on one device and on three."""
    results = []
    for strategy, devices in (("auto", 1), ("paral_dp", 3)):
        torch.manual_seed(2)
        trainer = quiet_trainer(strategy=strategy, devices=devices, **({"max_epochs": 2} | options))
        results.append(run(trainer, make()))
    return results


def fitted(trainer: Any, module: LightningModule) -> dict[str, Tensor]:
    trainer.fit(module, samples())
    return module.state_dict()


def assert_same_weights(weights: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).abs().max() <= tolerance, name


class Scores(LightningModule):
    """Base class of modules that compute a score for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).tanh()).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# Training


def test_replicas_run_at_the_same_time_and_two_runs_give_the_same_bits() -> None:
    all_there = threading.Barrier(3)

    class Waiting(Scores):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if batch_idx == 0:
                all_there.wait(timeout=10)
            return super().training_step(batch, batch_idx)

    def fit_once() -> dict[str, Tensor]:
        torch.manual_seed(2)
        return fitted(dp_trainer(), Waiting())

    first, second = fit_once(), fit_once()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_example_under_its_overlay_has_the_loss_of_one_process(monkeypatch: Any, tmp_path: Path) -> None:
    overlay = ["--config", str(ROOT / "configs/strategies/dp.yaml")]
    alone = run_cli(monkeypatch, tmp_path, "fit", "--seed_everything=1", val_check_interval=2)

    divided = run_cli(monkeypatch, tmp_path, "fit", "--seed_everything=1", *overlay, val_check_interval=2)

    assert (alone.num_devices, divided.num_devices) == (1, 2)
    for name in ("train_loss", "val_loss"):
        torch.testing.assert_close(divided.callback_metrics[name], alone.callback_metrics[name], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"precision": "64-true"},
    ],
    ids=str,
)
def test_training_with_small_last_batches_equals_one_process(options: dict[str, Any]) -> None:
    expected, weights = one_process_and_dp(Scores, fitted, **options)

    assert_same_weights(weights, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_reaches_every_replica(precision: str) -> None:
    dtypes = set()

    class Watched(Scores):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x)
            dtypes.add((hidden.dtype, self.hidden.weight.dtype, torch.get_default_dtype()))
            return self.out(hidden.tanh()).squeeze(1)

    expected, weights = one_process_and_dp(Watched, fitted, precision=precision)

    true = precision == "bf16-true"
    other = torch.bfloat16 if true else torch.float32
    assert dtypes == {(torch.bfloat16, other, other)}
    assert torch.get_default_dtype() == torch.float32
    assert_same_weights(weights, expected, tolerance=3e-2 if true else 3e-3)


def test_batch_norm_normalizes_by_replica_and_keeps_the_first_replicas_statistics() -> None:
    class Normed(Scores):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES, momentum=1.0)
            self.register_buffer("num_seen", torch.tensor(0))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.num_seen += len(batch[0])
            self.last = batch[0]
            return self(self.norm(batch[0])).square().mean()

    module, data = Normed(), samples()

    dp_trainer(devices=2, max_steps=1).fit(module, data)

    first = data.dataset.tensors[0][:2]  # of 5 samples, replica 0 has 2
    torch.testing.assert_close(module.norm.running_mean, first.mean(dim=0))
    assert module.num_seen == 2
    assert torch.equal(module.last, first)  # also true of attributes


# Failures


def test_error_in_a_replica_keeps_its_type_and_traceback_and_says_where() -> None:
    class Failing(Scores):
        def deep_inside(self, batch: list[Tensor]) -> None:
            if batch[0][0, 0] == samples().dataset[3][0][0]:
                raise KeyError("the reason")

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            self.deep_inside(batch)
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError, match="the reason") as caught:
        dp_trainer().fit(module, samples())

    assert "deep_inside" in [entry.name for entry in caught.traceback]
    assert caught.value.__notes__ == ["This was raised in replica 2 of 3 (paral_dp), on cpu."]
    assert "log" not in module.__dict__
    dp_trainer().fit(Scores(), samples())


def with_hidden(change: Any) -> Scores:
    module = Scores()
    module.hidden = change(module.hidden)
    return module


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


class Manual(Scores):
    automatic_optimization = False

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", self(batch[0]).mean())


def test_module_with_manual_optimization_is_evaluated_and_trains_on_one_device() -> None:
    dp_trainer().test(Manual(), samples())
    dp_trainer(devices=1).fit(Manual(), samples())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_hidden(torch.compile), "hidden is compiled.*paral_ddp"),
        (lambda: with_hidden(compiled_in_place), "hidden is compiled.*paral_ddp"),
        (lambda: with_hidden(torch.jit.script), "hidden is a ScriptModule.*paral_ddp"),
        (lambda: with_hidden(lambda _: nn.LazyLinear(6)), "hidden.weight has no shape yet.*Run a batch"),
        (Manual, "Manual uses manual optimization.*paral_ddp"),
    ],
)
def test_module_that_cannot_be_replicated_is_refused_before_training(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dp_trainer().fit(make(), samples())


def make_trainer_on_rank() -> str:
    with pytest.raises(ConfigurationError) as caught:
        dp_trainer(devices=2)
    return str(caught.value)


def test_batch_that_cannot_be_divided_is_refused_on_several_devices_only() -> None:
    class Unlike(Scores):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return self(batch["inputs"]).mean() * batch["classes"].sum()

    data = DataLoader([{"inputs": torch.ones(2, FEATURES), "classes": torch.ones(5)}], batch_size=None)
    dp_trainer(devices=1).fit(Unlike(), data)
    with pytest.raises(ConfigurationError, match=r"\['inputs'\] has 2, batch\['classes'\] has 5"):
        dp_trainer(devices=2).fit(Unlike(), data)


def test_several_processes_are_refused(on_ranks: Any) -> None:
    for message in on_ranks(2, make_trainer_on_rank):
        assert "one process on one node, but 2 processes were started" in message
