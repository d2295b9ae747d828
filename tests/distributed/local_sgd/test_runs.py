"""What a run under local SGD saves, evaluates, averages and sends, and how it ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_paral import ConfigurationError, ParalDDPStrategy, ParalLocalSGDStrategy, RankFailedError
from lightning_paral.checkpoint.load import load
from lightning_paral.comm import count_traffic
from lightning_paral.comm.direct import BLOCK, int8_average
from lightning_paral.distributed.exchange import RankGroup, gather_objects
from tests.distributed.local_sgd.training import Model, Weights, ddp, distance, fit, local, samples, weights_of
from tests.running import SaveAt, logged, quiet_trainer

HARDEST = {"period": 4, "outer_momentum": 0.9, "nesterov": True, "wire_dtype": "int8"}


def mean_of_ranks(weights: Weights) -> Weights:
    found = gather_objects(weights)
    return {name: torch.stack([each[name] for each in found]).mean(dim=0) for name in weights}


class Watched(Callback):
    """Records the mean of the ranks' weights after each step, validation losses, and how far ranks then differ."""

    def __init__(self) -> None:
        self.means: list[Weights] = []
        self.losses: list[float] = []
        self.apart: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.means.append(mean_of_ranks(weights_of(module)))

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        weights = weights_of(module)
        self.apart.append(distance(weights, mean_of_ranks(weights)))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())


# Checkpoints


def resumed(path: str, options: dict[str, Any], optimizer: str) -> list[Weights]:
    """Return the weights of a fit that does not save, of one that saves after step 6, and of one that resumes there."""
    plain = fit(local(**options), optimizer, steps=10)
    saving = fit(local(**options), optimizer, SaveAt(6, path), steps=10)
    return [plain, saving, fit(local(**options), optimizer, steps=10, resume_from=path)]


@pytest.mark.parametrize(
    ("ranks", "options", "optimizer"),
    [
        (2, HARDEST | {"checkpoint": "sharded"}, "adamw"),
        (3, {"period": 6}, "momentum"),
        (4, HARDEST | {"islands": 2, "backup": "device"}, "adamw"),
    ],
)
def test_resumes_exactly_and_saving_changes_nothing(on_ranks, tmp_path: Path, ranks, options, optimizer) -> None:
    for plain, saving, again in on_ranks(ranks, resumed, str(tmp_path / "saved.ckpt"), options, optimizer):
        assert all(torch.equal(plain[name], saving[name]) for name in plain)
        assert all(torch.equal(plain[name], again[name]) for name in plain)


def save_inside_period(path: str) -> Weights:
    watched = Watched()
    fit(local(period=4), "adamw", watched, SaveAt(6, path), steps=8)
    return watched.means[5]


def resume_elsewhere(path: str, strategy: str) -> tuple[Weights, list[str]]:
    with logged("lightning.pytorch.utilities.rank_zero") as said:
        made = ddp() if strategy == "ddp" else local(period=4)
        weights = fit(made, "adamw", steps=10, resume_from=path, max_steps=6)  # no further step
    return weights, said


def test_other_islands_and_strategies_go_on_from_the_mean(on_ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    mean = on_ranks(2, save_inside_period, path)[0]
    for ranks, strategy in ((3, "local"), (1, "local"), (2, "ddp")):
        (weights, said), *_ = on_ranks(ranks, resume_elsewhere, path, strategy)
        weights = {name: value for name, value in weights.items() if "running" not in name}
        assert distance(weights, {name: mean[name] for name in weights}) < 1e-14
        assert any(f"of 2 islands, and this run has {ranks}" in each for each in said) == (strategy == "local")


# Evaluation and averages


def evaluate(path: str) -> tuple[float, float, list[Weights], Weights]:
    watched = Watched()
    options = {"max_epochs": 2, "val_check_interval": 3}
    final = fit(local(period=4), "adamw", watched, SaveAt(3, path), steps=5, **options)
    alone = fit(local(period=4), "adamw", steps=5, **options | {"limit_val_batches": 0})
    module = Model()
    module.load_state_dict(load(path, RankGroup())["state_dict"])
    (again,) = quiet_trainer(strategy="auto", devices=1).validate(module, samples(2), verbose=False)
    losses = torch.tensor(gather_objects(again["val_loss"])).mean().item()
    return losses, watched.losses[0], [final, alone], watched.means[-1]


def test_evaluation_and_the_end_use_the_mean_and_change_nothing(on_ranks, tmp_path: Path) -> None:
    found = on_ranks(2, evaluate, str(tmp_path / "saved.ckpt"))
    for expected, loss, (final, alone), mean in found:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert all(torch.equal(final[name], alone[name]) for name in final)
        named = [name for name in final if "running" not in name]
        assert max((final[name] - mean[name]).abs().max() for name in named) < 1e-14
        assert all(torch.equal(final[name], found[0][2][0][name]) for name in final)


def average(path: str) -> tuple[Weights, Weights, Weights]:
    watched, ema = Watched(), EMAWeightAveraging(decay=0.7, update_starting_at_step=0)
    final = fit(local(period=4), "adamw", watched, ema, SaveAt(6, path), steps=7, val_check_interval=3)
    assert max(watched.apart) < 1e-14
    saved = {name: value.clone() for name, value in load(path, RankGroup())["state_dict"].items()}
    expected: Weights = {}
    for number, mean in enumerate(watched.means):
        expected = {n: expected[n].lerp(v, 0.3) if number else v for n, v in mean.items()}
        if number == 5:
            at_save = expected
    return final, expected, {name: value - saved[name] for name, value in at_save.items()}


def test_ema_averages_the_mean(on_ranks, tmp_path: Path) -> None:
    for final, expected, off in on_ranks(2, average, str(tmp_path / "saved.ckpt")):
        named = [name for name in final if "running" not in name]
        assert max((final[name] - expected[name]).abs().max() for name in named) < 1e-12
        assert max(off[name].abs().max() for name in named) < 1e-12


class Plateaus(Model):
    """Reduces the learning rate of each island after validations without a better loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def test_step(self, batch: list[Any], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Any], batch_idx: int) -> Any:
        return self(batch[0])


def stop_early() -> tuple[list[Any], list[Any], list[Any]]:
    torch.manual_seed(3)
    module, stopping = Plateaus(), EarlyStopping("val_loss", patience=2)
    trainer = quiet_trainer(strategy=local(period=4), devices=2, max_epochs=20, callbacks=[stopping])
    trainer.fit(module, samples(5), samples(2))
    of_islands = [stopping.stopped_epoch, trainer.optimizers[0].param_groups[0]["lr"], stopping.best_score.item()]
    final = Plateaus()
    final.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    (tested,) = trainer.test(module, samples(2), verbose=False)
    predicted = trainer.predict(module, samples(2))
    with torch.no_grad():
        expected = [final.eval()(inputs) for inputs, _ in samples(2)]
    (alone,) = quiet_trainer(strategy="auto", devices=1).test(final, samples(2), verbose=False)
    return of_islands, [tested["test_loss"], alone["test_loss"]], [predicted, expected]


def test_schedulers_stopping_and_what_follows_the_fit_agree(on_ranks) -> None:
    found = on_ranks(2, stop_early)
    losses = [loss for _, (_, loss), _ in found]
    for of_islands, (tested, _), (predicted, expected) in found:
        assert of_islands == found[0][0]
        assert 0 < of_islands[0] < 19
        assert of_islands[1] < 0.5
        assert tested == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert len(predicted) == len(expected) // 2
    together = [batch for pair in zip(*(predicted for _, _, (predicted, _) in found), strict=True) for batch in pair]
    assert all(torch.allclose(got, want) for got, want in zip(together, found[0][2][1], strict=True))


# What user code writes, and does not use


class Initializes(Callback):
    """Writes equal weights on all ranks, in the hook `when`."""

    def __init__(self, when: str) -> None:
        setattr(self, when, self._write)

    def _write(self, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        for number, parameter in enumerate(module.parameters()):
            parameter.data.copy_(torch.arange(parameter.numel()).add(number).sin().mul(0.3).view(parameter.shape))


def initialize_late() -> list[float]:
    first, *others = (
        fit(local(**HARDEST), "adamw", Initializes(when)) for when in ("setup", "on_fit_start", "on_train_start")
    )
    return [distance(each, first) for each in others]


def test_training_starts_from_weights_that_hooks_write(on_ranks) -> None:
    assert on_ranks(2, initialize_late)[0] == [0.0, 0.0]


class WithTeacher(Model):
    """Has a layer that no loss uses, or with `momentum` writes it in each step."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__("adamw")
        self.teacher, self.momentum = nn.Linear(8, 32).double().requires_grad_(not momentum), momentum

    def on_train_batch_end(self, *_: Any) -> None:
        if self.momentum:
            self.teacher.weight.data.lerp_(self.hidden.weight.data, self.momentum)


def fit_with_teacher(strategy: Any, **options: Any) -> Weights:
    torch.manual_seed(3)
    module = WithTeacher(**options)
    quiet_trainer(strategy=strategy, devices=2, max_epochs=1).fit(module, samples(6))
    return weights_of(module)


def leave_unused() -> float:
    of_ddp = fit_with_teacher(ParalDDPStrategy(find_unused_parameters=True))
    return distance(fit_with_teacher(local(period=9, warmup_steps=6)), of_ddp)


def test_warm_up_leaves_what_no_rank_uses(on_ranks) -> None:
    assert max(on_ranks(2, leave_unused)) < 1e-12


def write_frozen() -> None:
    with pytest.raises(ConfigurationError, match=r"were written during training: teacher\.weight\. .*buffers"):
        fit_with_teacher(local(period=4), momentum=0.1)


def test_written_frozen_parameters_are_refused(in_own_world) -> None:
    in_own_world(2, write_frozen)


# The wire


def send(num_bytes_of: dict[str, float]) -> dict[str, tuple[float, float]]:
    found = {}
    for wire, width in num_bytes_of.items():
        ranks, steps, period = dist.get_world_size(), 6, 3
        module = Model(is_linear=True)
        module.hidden = nn.Linear(8, BLOCK * ranks, bias=False)
        strategy = local(period=period, wire_dtype=None if wire == "fp32" else wire)
        with count_traffic() as traffic:
            trainer = quiet_trainer(strategy=strategy, devices=ranks, max_epochs=1)
            trainer.fit(module.float(), samples(steps, dtype=torch.float32))
        numel = module.hidden.weight.numel()
        found[wire] = traffic.payload_bytes / steps, 2 * (ranks - 1) / ranks * numel * width / period
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_per_step(on_ranks, ranks: int) -> None:
    widths = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK}
    for found in on_ranks(ranks, send, widths):
        assert all(sent == expected for sent, expected in found.values()), found


def sum_of_averages(carries: bool) -> tuple[torch.Tensor, float]:
    torch.manual_seed(dist.get_rank())
    value = torch.randn(3000, dtype=torch.float64)
    error, total = torch.zeros_like(value), torch.zeros_like(value)
    for _ in range(50):
        error = error if carries else torch.zeros_like(value)
        total += int8_average(value.clone(), error)
    mean = torch.stack(gather_objects(value)).mean(dim=0)
    return total, ((total / 50 - mean).abs().max() / mean.abs().max()).item()


def test_int8_carries_its_error_over(on_ranks) -> None:
    carried, lost = on_ranks(3, sum_of_averages, True), on_ranks(3, sum_of_averages, False)

    assert all(torch.equal(total, carried[0][0]) for total, _ in carried)
    assert max(off for _, off in carried) < 1e-3 < min(off for _, off in lost)


# Failures and refusals


class Fails(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5 and trainer.global_rank == 1:
            raise RuntimeError("of the user's")


def fail() -> str:
    with pytest.raises((RuntimeError, RankFailedError)) as caught:
        fit(local(period=4, timeout=20.0), "adamw", Fails(), steps=12)
    return str(caught.value)


def test_failure_of_a_rank_ends_all(in_own_world) -> None:
    for message in in_own_world(3, fail):
        assert "of the user's" in message


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class UsesLBFGS(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"period": None}, {}, "paral_local_sgd needs a period.*PARAL_PERIOD"),
        ({"nesterov": True}, {}, "needs an outer_momentum"),
        ({"split": "global"}, {}, "promises the numbers of one process.*or use paral_ddp"),
        ({"islands": 3}, {"devices": 4}, "islands=3 does not divide the 4 ranks"),
        ({}, {"plugins": MixedPrecision("16-mixed", "cuda")}, "each island would skip other steps"),
        ({}, {"module": Manual}, "manual optimization.*or use paral_ddp"),
        ({}, {"module": UsesLBFGS}, "LBFGS"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, options, trainer, message: str) -> None:
    monkeypatch.delenv("PARAL_PERIOD", raising=False)
    make = trainer.pop("module", Model)
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(strategy=local(**options), **{"devices": 1} | trainer).fit(make(), samples(1))


def test_name_takes_its_period_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAL_PERIOD", "20")

    strategy: Any = quiet_trainer(strategy="paral_diloco", devices=1).strategy

    assert isinstance(strategy, ParalLocalSGDStrategy)
    assert strategy.layout.period == 20
