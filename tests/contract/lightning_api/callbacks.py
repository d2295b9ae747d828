"""Rows for every callback in `lightning.pytorch.callbacks`."""

from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from tests.contract.lightning_api.rows import ALL, LIGHT, row
from tests.contract.tables.run import OfRankZero, Run, Saving, metrics_of
from tests.contract.user_code.models import Supervised, validated


class Scheduled(Supervised):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@row("`BasePredictionWriter`")
def writer(run: Run) -> dict[str, Any]:
    written: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
            written.extend(zip(indices, prediction.tolist(), strict=True))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            (batches,) = indices
            for each, prediction in zip(batches, predictions, strict=True):
                written.extend(zip(each, prediction.tolist(), strict=True))

    class Predicting(Supervised):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).sum(dim=1)

    loader = torch.utils.data.DataLoader(run.data()["train_dataloaders"].dataset, 12)
    run.trainer(callbacks=[Writer("batch_and_epoch")]).predict(run.module(Predicting), loader)
    return {"written, by sample": sorted(run.of_all_ranks(written))}


@row("`BatchSizeFinder`", reference="ddp", names="[Bb]atch size")
def batch_size_finder(run: Run) -> dict[str, Any]:
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=4)
    module = run.module(WithLoader)
    found = run.fit(module, loaders=None, callbacks=[finder])
    return {"batch size": module.batch_size, "weights": found["weights"]}


class WithLoader(Supervised):
    batch_size = 2

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 5, generator=generator)
        dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :3])
        return torch.utils.data.DataLoader(dataset, self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@row("`DeviceStatsMonitor`", columns=LIGHT)
def device_stats(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder)
    found = run.fit(callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=logger, log_every_n_steps=1)
    text = "".join(path.read_text() for path in run.folder.glob("**/metrics.csv"))
    return found | {"logged": OfRankZero(text.count("cpu_percent") > 0)}


@row("`EarlyStopping`")
def early_stopping(run: Run) -> dict[str, Any]:
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    found = run.fit(loaders=validated, callbacks=[stopping], max_epochs=6)
    return found | {"stopped": (stopping.stopped_epoch, stopping.wait_count), "best": float(stopping.best_score)}


@row("`EMAWeightAveraging`", columns=ALL)
def ema(run: Run) -> dict[str, Any]:
    callbacks = [EMAWeightAveraging(decay=0.5), Saving(run, "x.ckpt")]
    found = run.fit(loaders=validated, callbacks=callbacks, max_epochs=2)
    return found | {"saved": run.saved(run.folder / "x.ckpt")}


@row("`WeightAveraging`", columns=ALL)
def averaging(run: Run) -> dict[str, Any]:
    class Late(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx >= 2

    return run.fit(loaders=validated, callbacks=[Late()], max_epochs=2)


@row("`StochasticWeightAveraging`", columns=ALL)
def swa(run: Run) -> dict[str, Any]:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    return run.fit(loaders=validated, callbacks=[averaging], max_epochs=3)


@row("`GradientAccumulationScheduler`", columns=ALL, names="accumulate_grad_batches")
def accumulation(run: Run) -> dict[str, Any]:
    return run.fit(callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=2)


@row("`LambdaCallback`, `Callback`", columns=LIGHT)
def lambdas(run: Run) -> dict[str, Any]:
    called: list[Any] = []
    names = ("setup", "on_fit_start", "on_train_epoch_end", "on_fit_end", "teardown")
    hooks = {name: lambda *args, name=name, **kwargs: called.append(name) for name in names}
    return run.fit(callbacks=[LambdaCallback(**hooks)]) | {"called": called}


@row("`LearningRateFinder`", columns=ALL, reference="ddp")
def rate_finder(run: Run) -> dict[str, Any]:
    class Rated(Supervised):
        lr = 0.05

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    module = run.module(Rated)
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=20, early_stop_threshold=None)
    found = run.fit(module, callbacks=[finder], max_epochs=9)
    assert finder.optimal_lr is not None
    return found | {"lr": module.lr, "tried": finder.optimal_lr.results["lr"]}


@row("`LearningRateMonitor(log_momentum=True, log_weight_decay=True)`", columns=ALL)
def rate_monitor(run: Run) -> dict[str, Any]:
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    logger = CSVLogger(run.folder)
    found = run.fit(Scheduled, callbacks=[monitor], logger=logger, log_every_n_steps=1, max_epochs=2)
    return found | {"file": metrics_of(run), "lrs": monitor.lrs}


@row("`ModelSummary(max_depth=2)`", columns=LIGHT)
def summary(run: Run) -> dict[str, Any]:
    printed: list[Any] = []

    class Kept(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total: int, trained: int, size: float, *args: Any, **kwargs: Any) -> None:
            printed.append((dict(summary_data)["Name"], dict(summary_data)["Params"], total, trained, size))

    return run.fit(callbacks=[Kept(max_depth=2)], enable_model_summary=True) | {"printed": OfRankZero(printed)}


@row("`RichModelSummary`, `RichProgressBar`")
def rich(run: Run) -> dict[str, Any]:
    callbacks = [RichModelSummary(), RichProgressBar()]
    return run.fit(loaders=validated, callbacks=callbacks, enable_model_summary=True, enable_progress_bar=True)


@row("`TQDMProgressBar`, `ProgressBar`", covers=("ProgressBar",))
def bar(run: Run) -> dict[str, Any]:
    seen: list[Any] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, module, *args)
            seen.append((self.total_train_batches, sorted(self.get_metrics(trainer, module))))

    class Shown(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("shown", loss, prog_bar=True)
            return loss

    assert issubclass(Bar, ProgressBar)
    return run.fit(Shown, loaders=validated, callbacks=[Bar()], enable_progress_bar=True) | {"seen by the bar": seen}


@row("`SpikeDetection`", reference="ddp")
def spikes(run: Run) -> dict[str, Any]:
    detection = SpikeDetection(warmup=1, exclude_batches_path=run.folder / f"skip-{run.rank}.json")
    return run.fit(callbacks=[detection])


@row("`ThroughputMonitor`", columns=LIGHT)
def throughput(run: Run) -> dict[str, Any]:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    logger = CSVLogger(run.folder)
    found = run.fit(callbacks=[monitor], logger=logger, log_every_n_steps=1)
    header = [path.read_text().splitlines()[0] for path in run.folder.glob("**/metrics.csv")]
    return found | {"logged": OfRankZero("device/batches_per_sec" in "".join(header))}


@row("`Timer`", columns=LIGHT)
def timer(run: Run) -> dict[str, Any]:
    timer = Timer(duration={"seconds": 0}, interval="step")
    found = run.fit(callbacks=[timer], max_epochs=3)
    return {"steps": found["steps"], "elapsed": timer.time_elapsed() > 0}
