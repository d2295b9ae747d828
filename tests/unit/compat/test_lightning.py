"""Canaries: Lightning still calls the methods that `compat.lightning` replaces, and behaves as it expects."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn import Linear
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_paral.compat.lightning import evaluation, metrics
from lightning_paral.compat.lightning.methods import replace_methods, shadow_method
from lightning_paral.compat.lightning.results import ResultCollection
from lightning_paral.compat.lightning.samplers import injects_sampler, replace_preparation
from lightning_paral.compat.private_name import PrivateName
from lightning_paral.errors import PrivateNameError
from tests.running import quiet_trainer


class Model(LightningModule):
    """Calls `on_step` in each training, validation, test and prediction step."""

    def __init__(self, on_step: Callable[["Model"], None] = lambda _: None) -> None:
        super().__init__()
        self.layer = Linear(2, 1)
        self.on_step = on_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.on_step(self)
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.on_step(self)
        self.log("logged", batch[0].mean())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> int:
        self.on_step(self)
        return batch_idx

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(num_batches: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(num_batches, 2)), batch_size=1)


def trainer(**options: Any) -> Trainer:
    return quiet_trainer(
        **{"max_epochs": 1, "num_sanity_val_steps": 0, "strategy": SingleDeviceStrategy("cpu")} | options
    )


def test_evaluation_runs_each_step_and_each_end_of_a_loader_through_replaced_methods() -> None:
    plain, calls, counted = trainer(), [], []
    loop, results = plain.validate_loop, ResultCollection(training=False)
    seen: list[Model] = []

    def noted(step: evaluation.Step) -> evaluation.Step:
        def noted_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            calls.append((batch_idx, dataloader_idx, dataloader_iter))
            assert evaluation.combined_loader_of(loop).flattened
            if batch_idx == 0:
                step(batch, batch_idx, dataloader_idx, dataloader_iter)
            else:
                before = loop.batch_progress.current.completed
                evaluation.call_step_without_hooks(plain, loop, "validation_step", batch, batch_idx, dataloader_idx)
                counted.append(loop.batch_progress.current.completed - before)

        return noted_step

    with ExitStack() as undo:
        evaluation.replace_evaluation_step(loop, noted, undo)
        evaluation.call_at_end_of_loader(loop, plain, lambda: calls.append("end"), undo)
        evaluation.set_results(loop, results)
        plain.validate(Model(seen.append), [loader(2), loader(1)], verbose=False)
    assert calls == [(0, 0, None), (1, 0, None), "end", (0, 1, None), "end"], "Lightning evaluates by other methods"
    assert len(seen) == 3
    assert counted == [0], "a step alone counts as a batch"
    assert evaluation.results_of(loop) is results
    assert "_evaluation_step" not in vars(loop)


def test_loaders_are_prepared_by_a_replaced_method() -> None:
    plain, prepared = trainer(use_distributed_sampler=False), []

    def prepare(data: object, shuffle: bool, mode: Any) -> object:
        prepared.append((shuffle, str(mode.value)))
        return by_lightning(data, shuffle, mode)

    with ExitStack() as undo:
        by_lightning = replace_preparation(plain, prepare, undo)
        plain.fit(Model(), loader(), loader())
    assert prepared == [(True, "train"), (False, "validate")], "Lightning prepares loaders by another method"
    assert injects_sampler(plain) is False


def test_metrics_gather_with_the_replaced_function() -> None:
    metric, called = MeanMetric(), []

    undo = metrics.replace_gathering(lambda *args, process_group: called.append((*args, process_group)))
    metric.sync(process_group="group", distributed_available=lambda: True)
    undo()

    assert called == [(metric, metric._sync_dist, gather_all_tensors, "group")]


@pytest.mark.parametrize(
    "replace",
    [
        lambda: shadow_method(Model(), "_gone", print),
        lambda: replace_methods(WeightAveraging, {"_gone": print}),
        lambda: PrivateName(
            name="torch.nn.Module._gone", on_instances=True, purpose="to show this", reason="none", seen="none"
        ).replace_on(Model(), None),
    ],
    ids=["method of an instance", "method of a class", "attribute"],
)
def test_replacing_a_missing_attribute_raises(replace: Callable[[], Any]) -> None:
    with pytest.raises(PrivateNameError, match=r"_gone.*[Ii]nstall"):
        replace()


def test_resuming_inside_an_epoch_does_not_warn_or_change_warning_filters(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    first = trainer(strategy="paral_ddp", devices=1, callbacks=[checkpoints], enable_checkpointing=True)
    first.fit(Model(), loader(3))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        resumed = trainer(strategy="paral_ddp", devices=1)
        resumed.fit(Model(), loader(3), ckpt_path=tmp_path / "step=2.ckpt")
        assert warnings.filters == before
    assert resumed.global_step == 3
    assert not [each for each in warned if "resuming from a checkpoint" in str(each.message)]
