"""Rows for every argument of the Trainer, with values that change the run."""

from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins import LayerSync, MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from tests.contract.lightning_api.rows import ALL, LIGHT, RANKS, row
from tests.contract.tables.run import OfRankZero, Run, metrics_of, plain
from tests.contract.user_code.models import Normalized, Supervised, regression, validated

FITS: dict[str, dict[str, Any]] = {
    "`num_nodes=1`": {"num_nodes": 1},
    "`max_epochs=0`": {"max_epochs": 0},
    "`max_steps=3`": {"max_steps": 3, "max_epochs": -1},
    "`max_time`": {"max_time": {"hours": 1}},
    "`limit_train_batches=3`": {"limit_train_batches": 3},
    "`limit_train_batches=0.5`": {"limit_train_batches": 0.5},
    "`limit_train_batches=0`": {"limit_train_batches": 0},
    "`limit_val_batches=1`": {"limit_val_batches": 1},
    "`limit_val_batches=0`": {"limit_val_batches": 0},
    "`fast_dev_run=2`": {"fast_dev_run": 2},
    "`val_check_interval=0.25`": {"val_check_interval": 0.25},
    '`val_check_interval="00:01:00:00"`': {"val_check_interval": "00:01:00:00"},
    "`check_val_every_n_epoch=2`": {"check_val_every_n_epoch": 2, "max_epochs": 2},
    "`check_val_every_n_epoch=None`": {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 2},
    "`num_sanity_val_steps=0`": {"num_sanity_val_steps": 0},
    "`benchmark=True`": {"benchmark": True},
    "`enable_autolog_hparams=False`": {"enable_autolog_hparams": False},
    "`plugins=LightningEnvironment()`": {"plugins": LightningEnvironment},
}
EVALUATION_FITS: dict[str, dict[str, Any]] = {
    "`max_epochs=3`": {"max_epochs": 3},
    "`overfit_batches=0.5`": {"overfit_batches": 0.5, "max_epochs": 2},
    "`fast_dev_run=True`": {"fast_dev_run": True},
    "`val_check_interval=2`": {"val_check_interval": 2},
    "`num_sanity_val_steps=-1`": {"num_sanity_val_steps": -1},
    "`enable_model_summary=True`": {"enable_model_summary": True},
    "`enable_progress_bar=True`": {"enable_progress_bar": True},
    "`detect_anomaly=True`": {"detect_anomaly": True},
    "`barebones=True`": {"barebones": True},
    "`reload_dataloaders_every_n_epochs=1`": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
}
OPTIMIZER_FITS: dict[str, dict[str, Any]] = {
    "`accumulate_grad_batches=3`": {"accumulate_grad_batches": 3},
    "`gradient_clip_val=0.1`": {"gradient_clip_val": 0.1},
    '`gradient_clip_algorithm="value"`': {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "`deterministic=True`": {"deterministic": True},
    '`precision="bf16-true"`': {"precision": "bf16-true"},
    '`precision="64-true"`': {"precision": "64-true"},
    '`precision="bf16-mixed"`': {"precision": "bf16-mixed"},
    '`precision="16-mixed"`': {"precision": "16-mixed"},
    "`overfit_batches=2`": {"overfit_batches": 2, "max_epochs": 2},
}
TOLERANCES = {"bf16-true": 2e-2, "bf16-mixed": 1e-2, "16-mixed": 1e-2}


def fitted(options: dict[str, Any]) -> Any:
    def scenario(run: Run) -> dict[str, Any]:
        made = {name: value() if isinstance(value, type) else value for name, value in options.items()}
        return run.fit(loaders=validated, **made)

    return scenario


@row('`accelerator="auto"`', columns=LIGHT)
def best_accelerator(run: Run) -> dict[str, Any]:
    # As on a node without GPUs, because the ranks communicate by gloo.
    with (
        patch.object(CUDAAccelerator, "is_available", return_value=False),
        patch.object(MPSAccelerator, "is_available", return_value=False),
    ):
        return run.fit(loaders=validated, accelerator="auto")


for label, options in FITS.items():
    row(label, columns=LIGHT)(fitted(options))
for label, options in EVALUATION_FITS.items():
    row(label)(fitted(options))
for label, options in OPTIMIZER_FITS.items():
    precision = str(options.get("precision", ""))
    refused = precision or str(options.get("gradient_clip_algorithm", ""))
    row(label, columns=ALL, tolerance=TOLERANCES.get(precision, 1e-5), names=refused)(fitted(options))


@row("`devices=1`: fit, resume, validate, test, predict", columns=ALL, num_ranks=1, covers=("strategy",))
def one_device(run: Run) -> dict[str, Any]:
    class Every(Observing):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(run.folder / "x.ckpt")

    run.fit(Every, loaders=validated)
    found = run.fit(Every, validated, how={"ckpt_path": run.folder / "x.ckpt"}, max_epochs=2, gradient_clip_val=0.1)
    module, trainer, loader = run.module(Every), run.trainer(), run.data()["train_dataloaders"]
    logged = [trainer.validate(module, loader, ckpt_path=run.folder / "x.ckpt"), trainer.test(module, loader)]
    return found | {"logged": logged, "predicted": plain(trainer.predict(module, loader)), "seen": []}


@row("`devices=1`: ordinary loaders, shuffled, with accumulation", columns=ALL, num_ranks=1)
def one_device_shuffled(run: Run) -> dict[str, Any]:
    def loaders(rank: int, num_ranks: int) -> dict[str, Any]:
        dataset = regression(0, 1)["train_dataloaders"].dataset
        return {name: torch.utils.data.DataLoader(dataset, 5, shuffle="train" in name) for name in LOADERS}

    return run.fit(loaders=loaders, accumulate_grad_batches=2, max_epochs=2)


LOADERS = ("train_dataloaders", "val_dataloaders")


@row("`min_epochs`, `min_steps`", columns=ALL)
def minimal(run: Run) -> dict[str, Any]:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = True

    least = run.fit(callbacks=[Stop()], min_epochs=2, max_epochs=5)
    steps = run.fit(callbacks=[Stop()], min_steps=3, max_epochs=5)
    return {"epochs": least["steps"], "steps": steps["steps"], "weights": steps["weights"]}


class Observing(Supervised):
    """Records the gradient mode and the training mode of each evaluated batch."""

    def observe(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch), sync_dist=True)

    validation_step = test_step = observe

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def note(self, *args: Any) -> None:
        self.seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = note


def evaluated(run: Run, **options: Any) -> dict[str, Any]:
    module, trainer = run.module(Observing), run.trainer(**options)
    loader = run.data()["train_dataloaders"]
    logged = [trainer.validate(module, loader), trainer.test(module, loader)]
    trainer.predict(module, loader)
    return {"logged": logged, "seen": module.seen}


@row("`inference_mode=False`")
def no_inference_mode(run: Run) -> dict[str, Any]:
    return evaluated(run, inference_mode=False)


@row("`inference_mode=True`", reference="ddp")
def inference_mode(run: Run) -> dict[str, Any]:
    return evaluated(run, inference_mode=True)


@row("`limit_test_batches`, `limit_predict_batches`")
def limited(run: Run) -> dict[str, Any]:
    return evaluated(run, inference_mode=False, limit_test_batches=3, limit_predict_batches=0.5, limit_val_batches=1)


@row('`deterministic="warn"`, `benchmark=None`', covers=("benchmark",))
def deterministic(run: Run) -> dict[str, Any]:
    return run.fit(deterministic="warn") | {"set": torch.is_deterministic_algorithms_warn_only_enabled()}


@row("`sync_batchnorm=True`, on CPU", names="[Bb]atch_?[Nn]orm")
def sync_batchnorm(run: Run) -> dict[str, Any]:
    return run.fit(Normalized, sync_batchnorm=run.num_devices > 1)


@row("`sync_batchnorm=True`, without BatchNorm", names="[Bb]atch_?[Nn]orm")
def sync_nothing(run: Run) -> dict[str, Any]:
    return run.fit(sync_batchnorm=run.num_devices > 1)


class MyNorm(nn.BatchNorm1d):
    """Replaces BatchNorm in a user's plugin."""


class MySync(LayerSync):
    def apply(self, model: nn.Module) -> nn.Module:
        model.norm.__class__ = MyNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        model.norm.__class__ = nn.BatchNorm1d
        return model


@row("`plugins=` a `LayerSync`", columns=RANKS, reference="ddp")
def layer_sync(run: Run) -> dict[str, Any]:
    class Asking(Normalized):
        def on_train_start(self) -> None:
            self.seen.append(type(self.norm).__name__)

    module = run.module(Asking)
    run.fit(module, plugins=[MySync()])
    return {"in the fit": module.seen, "after": type(module.norm).__name__}


@row("`plugins=` a `CheckpointIO`", names="CheckpointIO|MyIO")
def checkpoint_io(run: Run) -> dict[str, Any]:
    saved: list[str] = []

    class MyIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            saved.append(str(path))
            super().save_checkpoint(checkpoint, path, storage_options)

    found = run.fit(plugins=[MyIO()])
    run.last.save_checkpoint(run.folder / "x.ckpt")
    return found | {"saved": OfRankZero(len(saved))}


@row("`plugins=` a precision plugin", tolerance=1e-2, names="MixedPrecision")
def precision_plugin(run: Run) -> dict[str, Any]:
    return run.fit(plugins=[MixedPrecision("bf16-mixed", "cpu")])


@row("`default_root_dir`, `enable_checkpointing=True`", covers=("default_root_dir",))
def written(run: Run) -> dict[str, Any]:
    found = run.fit(enable_checkpointing=True)
    names = sorted(path.relative_to(run.folder).as_posix() for path in run.folder.glob("**/*.ckpt"))
    return found | {"files": OfRankZero(names), "saved": run.saved(run.last.checkpoint_callback.best_model_path)}


@row("`logger=True`, `log_every_n_steps=2`")
def logged(run: Run) -> dict[str, Any]:
    class Logging(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

    found = run.fit(Logging, logger=True, log_every_n_steps=2, max_epochs=2)
    return found | {"file": metrics_of(run)}


@row("`use_distributed_sampler=False`", reference="ddp")
def own_sampler(run: Run) -> dict[str, Any]:
    def loaders(rank: int, num_ranks: int) -> dict[str, Any]:
        return {"train_dataloaders": torch.utils.data.DataLoader(regression(0, 1)["train_dataloaders"].dataset, 12)}

    return run.fit(loaders=loaders, use_distributed_sampler=False)


@row("`model_registry`", columns=("paral_ddp",))
def registry(run: Run) -> dict[str, Any]:
    return run.fit(model_registry="of/somebody")
