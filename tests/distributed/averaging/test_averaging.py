"""Averages of weights (EMA, SWA) under every strategy equal those of one process; each rank keeps its shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_paral import ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.checkpoint.load import peek
from lightning_paral.cli.checkpoints import consolidate
from lightning_paral.errors import ConfigurationError
from tests.contract.cases import BY_LABEL, MAIN
from tests.models.averaged import MAX_EPOCHS, Averaged, fit
from tests.models.regression import regression_data
from tests.running import quiet_trainer

TOLERANCE = 1e-5


def partitioned(**more: Any) -> ParalZeROStrategy:
    """Return a stage 3 strategy that partitions parameters of any size."""
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0} | more}
    return ParalZeROStrategy(stage=3, deepspeed_config=config)


STRATEGIES: dict[str, Any] = {
    **{case.label.removeprefix("paral_"): case.strategy for case in MAIN},
    "fsdp_gathered": lambda: ParalFSDPStrategy(units=["Linear"], reshard_after_forward=False),
    "zero3_partitioned": partitioned,
    "lightning": lambda: "ddp",
}
DIVIDED = ("fsdp", "zero1", "zero2", "zero3", "zero3_partitioned")


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), value, rtol=0, atol=TOLERANCE, msg=name)


class Collectives(TorchDispatchMode):
    """Records the collectives inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("c10d"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Counted(EMAWeightAveraging):
    """Records the number of elements that a rank keeps, and the collectives of updates."""

    def __init__(self) -> None:
        super().__init__(decay=0.6)
        self.held = 0
        self.of_updates: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        with Collectives() as seen:
            super().on_train_batch_end(*args)
        self.of_updates += seen.names
        self.held = sum(parameter.numel() for parameter in self._average_model.module.parameters())


def fit_and_resume(label: str, num_ranks: int, folder: str, reference: str) -> dict[str, Any]:
    callback = Counted()
    path = Path(folder, f"{label}-{num_ranks}.ckpt")
    return {
        "fit": fit(STRATEGIES[label](), num_ranks, callback, save_to=path),
        "resumed": fit(STRATEGIES[label](), num_ranks, Counted(), resume_from=path),
        "resumed from one process": fit(STRATEGIES[label](), num_ranks, Counted(), resume_from=Path(reference)),
        "held": callback.held,
        "collectives": callback.of_updates,
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[dict[str, Tensor], list[float]]]:
    """A checkpoint of Lightning's own strategy in one process, and the final weights and losses of that run."""
    path = tmp_path_factory.mktemp("one") / "whole.ckpt"
    return path, fit("auto", 1, Counted(), save_to=path)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("label", [label for label in STRATEGIES if label != "lightning"])
def test_ema_equals_one_process_and_resumes_from_any_checkpoint(
    on_ranks, one_process, tmp_path: Path, label: str, num_ranks: int
) -> None:
    reference, (weights, losses) = one_process
    processes = 1 if label == "dp" else num_ranks
    ranks = on_ranks(processes, fit_and_resume, label, num_ranks, str(tmp_path), str(reference))
    for found in ranks:
        for kind in ("fit", "resumed", "resumed from one process"):
            assert_same_weights(found[kind][0], weights)
            assert found[kind][1] == pytest.approx(losses[-len(found[kind][1]) :], rel=TOLERANCE), kind
        assert len(found["fit"][1]) == MAX_EPOCHS
        assert found["collectives"] == []
    path = tmp_path / f"{label}-{num_ranks}.ckpt"
    _, content = peek(path)
    expected = torch.load(reference, weights_only=True)
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert_same_weights(content[key], expected[key])
    if label in DIVIDED and num_ranks == 2:
        whole = sum(parameter.numel() for parameter in Averaged().parameters())
        assert max(found["held"] for found in ranks) < 0.8 * whole
    if label in ("fsdp", "zero2"):
        other = fit("auto" if path.is_file() else "paral_ddp", 1, Counted(), resume_from=path)
        assert_same_weights(other[0], weights)
        consolidate([str(path), str(tmp_path / "file.ckpt")])
        consolidated = torch.load(tmp_path / "file.ckpt", weights_only=True)
        assert_same_weights(consolidated["current_model_state"], expected["current_model_state"])
        loaded = Averaged.load_from_checkpoint(tmp_path / "file.ckpt")
        assert_same_weights(loaded.state_dict(), expected["state_dict"])


# Subclasses, and where averages are evaluated


class EveryOther(WeightAveraging):
    """Averages in host memory, from the fourth step after every second step, and after the second epoch."""

    def __init__(self) -> None:
        super().__init__(device="cpu", use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return (step_idx is not None and step_idx >= 3 and step_idx % 2 == 0) or epoch_idx == 1


def fit_between_steps(strategy: str, num_ranks: int) -> Any:
    options = {"num_sanity_val_steps": 1, "val_check_interval": 2, "accumulate_grad_batches": 2}
    return fit(STRATEGIES.get(strategy, lambda: strategy)(), num_ranks, EveryOther(), num_batches=6, **options)


@pytest.mark.parametrize("label", ["ddp", "fsdp", "fsdp_gathered", "zero2", "zero3_partitioned"])
def test_subclass_chooses_updates_and_device_and_validation_runs_at_any_time(on_ranks, label: str) -> None:
    weights, losses = fit_between_steps("auto", 1)
    for found in on_ranks(2, fit_between_steps, label, 2):
        assert_same_weights(found[0], weights)
        assert found[1] == pytest.approx(losses, rel=TOLERANCE)


class ReadsWeights(Callback):
    """Reads weights in validation, through tensors that could be written to, and saves there."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            if not hasattr(parameter, "ds_status") or parameter.ds_status.name == "AVAILABLE":
                _ = parameter.data
        if self.path is not None and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class LowPrecision(Averaged):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.dtype))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step([part.to(self.dtype) for part in batch], batch_idx)
        self.losses.append(loss.item())
        return loss


def losses_with_and_without_average(label: str) -> list[list[float]]:
    losses = []
    for callbacks in ([], [EMAWeightAveraging(decay=0.5), ReadsWeights()]):
        torch.manual_seed(3)
        module = LowPrecision()
        options = {"max_epochs": 2, "num_batches": 4, "precision": "bf16-true", "callbacks": callbacks}
        fit(STRATEGIES[label](), 2, None, module=module, **options)
        losses.append(module.losses)
    return losses


@pytest.mark.parametrize("label", ["zero2", "zero3", "zero3_partitioned"])
def test_evaluating_averages_does_not_change_master_weights(on_ranks, label: str) -> None:
    for alone, averaged in on_ranks(2, losses_with_and_without_average, label):
        assert averaged == alone


def save_in_validation(label: str, folder: str) -> Any:
    path = Path(folder, f"{label}.ckpt")
    callback = EMAWeightAveraging(decay=0.6)
    torch.manual_seed(3)
    module = Averaged()
    callbacks = [callback, ReadsWeights(path)]
    trainer = quiet_trainer(devices=2, strategy=STRATEGIES[label](), max_epochs=3, callbacks=callbacks)
    trainer.fit(module, regression_data(5, 2), regression_data(2, 2))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    (again,) = trainer.validate(module, regression_data(2, 2), verbose=False)
    state = callback._average_model.state_dict()
    assert_same_weights({name[7:]: value for name, value in state.items() if name != "n_averaged"}, weights)
    resumed = fit(STRATEGIES[label](), 2, EMAWeightAveraging(decay=0.6), resume_from=path, num_sanity_val_steps=2)
    return module.validated[-2], again["val_loss"], weights, resumed[0]


@pytest.mark.parametrize("label", ["fsdp", "zero2", "zero3_partitioned"])
def test_save_during_validation_keeps_averages_and_weights_apart(on_ranks, tmp_path: Path, label: str) -> None:
    for last, again, weights, resumed in on_ranks(2, save_in_validation, label, str(tmp_path)):
        assert again == pytest.approx(last, rel=TOLERANCE)
        assert_same_weights(resumed, weights)


def loss_of_first_epoch(strategy: Any, folder: Path) -> float:
    saving = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    torch.manual_seed(3)
    callbacks = [EMAWeightAveraging(decay=0.5), saving]
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Averaged(), regression_data(3, 1), regression_data(2, 1))
    path = folder / "epoch=0.ckpt"
    return trainer.validate(ckpt_path=path, dataloaders=regression_data(2, 1), verbose=False)[0]["val_loss"]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_evaluating_a_checkpoint_after_a_fit_uses_its_averages(tmp_path: Path, strategy: str) -> None:
    expected = loss_of_first_epoch("auto", tmp_path / "one")
    assert loss_of_first_epoch(strategy, tmp_path / "ours") == pytest.approx(expected, rel=1e-5)


# SWA


def make_swa() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(0.03, 1, annealing_epochs=2, avg_fn=None, device=torch.device("cpu"))


def fit_swa(label: str, path: Path) -> Any:
    whole = fit(STRATEGIES[label](), 2, make_swa(), save_to=path, with_norm=True)
    return whole, fit(STRATEGIES[label](), 2, make_swa(), resume_from=path, with_norm=True)


def swa_state(callbacks: dict[str, Any]) -> dict[str, Any]:
    (state,) = (state for key, state in callbacks.items() if key.startswith("StochasticWeightAveraging"))
    return state


@pytest.mark.parametrize("label", ["ddp", *DIVIDED])
def test_swa_equals_ddp_including_the_batch_norm_pass(on_ranks, tmp_path: Path, label: str) -> None:
    expected, _ = on_ranks(2, fit_swa, "lightning", tmp_path / "lightning.ckpt")[0]
    for found in (each for rank in on_ranks(2, fit_swa, label, tmp_path / "x.ckpt") for each in rank):
        assert_same_weights(found[0], expected[0])
        assert found[1] == pytest.approx(expected[1][-len(found[1]) :], rel=1e-4)
    ours = swa_state(peek(tmp_path / "x.ckpt")[1]["callbacks"])
    theirs = swa_state(torch.load(tmp_path / "lightning.ckpt", weights_only=True)["callbacks"])
    assert_same_weights(ours["average_model_state"], theirs["average_model_state"])
    assert ours["n_averaged"] == theirs["n_averaged"]


# Averages that need full weights


class OwnCopy(WeightAveraging):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._average_model = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))


class OwnSwap(WeightAveraging):
    def _swap_models(self, pl_module: Any) -> None:
        pass


@pytest.mark.parametrize("strategy", ["paral_fsdp", "paral_zero2"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OwnCopy, r"OwnCopy copies the full module.*super\(\)\.setup"),
        (OwnSwap, r"OwnSwap overrides _swap_models"),
    ],
)
def test_callbacks_that_need_full_weights_are_refused(strategy: str, make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(strategy, 1, make())


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            BY_LABEL["paral_zero3_nvme"].strategy,
            r'EMAWeightAveraging cannot be used here: with parameters on NVMe.*offload_parameters="cpu"',
        ),
        (lambda: partitioned(zero_hpz_partition_size=2), r"zero_hpz_partition_size=2, DeepSpeed gathers"),
    ],
)
def test_offloaded_weights_are_refused(monkeypatch: pytest.MonkeyPatch, strategy: Any, message: str) -> None:
    check = "lightning_paral.strategies.zero.check_offload"  # needs a compiler
    monkeypatch.setattr(check, lambda options: None)
    with pytest.raises(ConfigurationError, match=message):
        fit(strategy(), 1, EMAWeightAveraging())


class Interrupts(Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        raise KeyError("of the user's")


def lost_averages(strategy: str) -> bool:
    callback = EMAWeightAveraging()
    with pytest.raises(KeyError, match="of the user's"), pytest.warns(UserWarning, match="averages of EMAWeightAver"):
        fit(strategy, dist.get_world_size(), callback, callbacks=[Interrupts()])
    assert WeightAveraging.setup.__qualname__ == "WeightAveraging.setup"  # Lightning's own
    return callback._average_model is None


def test_failed_fit_warns_that_averages_are_lost(on_ranks) -> None:
    assert on_ranks(1, lost_averages, "paral_zero2") == [True]
