"""Rows for loggers and profilers."""

from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only

from tests.contract.lightning_api.rows import LIGHT, row
from tests.contract.tables.run import OfRankZero, Run, metrics_of
from tests.contract.user_code.models import Supervised, validated


class Logging(Supervised):
    """Logs with every combination of options, and has hyper-parameters."""

    def __init__(self, width: int = 7, name: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"a": loss, "b": loss * 2}, sync_dist=True)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        return loss


class Recording(Logger):
    """A user's own logger."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[Any] = []
        self.hyperparameters: list[Any] = []
        self.ended = ""

    name = "recording"
    version = "0"

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.append(dict(params))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, {key: value for key, value in metrics.items() if key != "largest"}))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.ended = status


@row("`CSVLogger`", covers=("CSVLogger",))
def csv(run: Run) -> dict[str, Any]:
    class Plain(Logging):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

    logger = CSVLogger(run.folder, flush_logs_every_n_steps=1)
    found = run.fit(Plain, loaders=validated, logger=logger, log_every_n_steps=1, max_epochs=2)
    names = sorted(path.relative_to(run.folder).as_posix() for path in run.folder.glob("**/*.*"))
    written = "".join(path.read_text() for path in run.folder.glob("**/hparams.yaml"))
    return found | {"file": metrics_of(run), "files": OfRankZero(names), "hyper-parameters": OfRankZero(written)}


@row("a `Logger` of one's own, and several", columns=LIGHT, covers=("Logger",))
def own(run: Run) -> dict[str, Any]:
    loggers = [Recording(), Recording()]
    found = run.fit(Logging, loaders=validated, logger=loggers, log_every_n_steps=2, max_epochs=2)
    del found["metrics"]  # "largest" is that of one rank's batches
    kept = [(logger.metrics, logger.hyperparameters, logger.ended) for logger in loggers]
    return found | {"logged": OfRankZero(kept)}


@row('`self.log(reduce_fx="max", sync_dist=True)` of what ranks have of their own', reference="ddp")
def largest(run: Run) -> dict[str, Any]:
    found = run.fit(Logging, loaders=validated)
    return {"metrics": found["metrics"]}


@row("`self.logger.experiment`, `self.logger.log_metrics`", columns=LIGHT)
def experiment(run: Run) -> dict[str, Any]:
    class Direct(Supervised):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"mine": 1.0}, step=self.global_step)
            self.seen.append((type(self.logger.experiment).__name__ != "", len(self.loggers)))

    found = run.fit(Direct, logger=CSVLogger(run.folder), max_epochs=2)
    return found | {"file": metrics_of(run)}


PROFILERS = {
    "SimpleProfiler": lambda run: SimpleProfiler(run.folder, "simple"),
    "AdvancedProfiler": lambda run: AdvancedProfiler(run.folder, "advanced"),
    "PyTorchProfiler": lambda run: PyTorchProfiler(run.folder, "torch", export_to_chrome=False),
    "PassThroughProfiler": lambda run: PassThroughProfiler(),
}


def profiled(name: str) -> Any:
    def scenario(run: Run) -> dict[str, Any]:
        found = run.fit(loaders=validated, profiler=PROFILERS[name](run))
        texts = {path.name.split("-")[0] for path in run.folder.glob("fit-*.txt") if path.stat().st_size}
        return found | {"files": OfRankZero(texts)}

    return scenario


for name in PROFILERS:
    row(f"`profiler={name}(...)`", columns=LIGHT)(profiled(name))


@row('`profiler="simple"`')
def by_name(run: Run) -> dict[str, Any]:
    found = run.fit(profiler="simple")
    actions = sorted(run.last.profiler.recorded_durations)
    return found | {
        "actions": [
            action for action in actions if action.startswith(("run_training", "[Callback]", "[LightningModule]"))
        ]
    }
