"""Rows for LightningModule: logging, manual optimization, hyper-parameters, loading, export."""

from typing import Any

import torch
from torch import nn

from tests.contract.lightning_api.rows import ALL, fits, row
from tests.contract.tables.run import Run, Saving, plain
from tests.contract.user_code.models import Manual, Supervised, validated


class Clipped(Manual):
    def between(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


@row("manual optimization: `manual_backward`, `clip_gradients`, `lr_schedulers()`", columns=ALL)
def manual(run: Run) -> dict[str, Any]:
    return run.fit(Clipped, max_epochs=2)


@row("`self.log`: `reduce_fx`, `sync_dist`, `batch_size`, `prog_bar`; `self.log_dict`")
def log(run: Run) -> dict[str, Any]:
    class Logging(Supervised):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log("mean", loss, sync_dist=True, batch_size=len(batch[0]), prog_bar=True)
            self.log("sum", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
            self.log("max", batch[0].max(), reduce_fx="max", sync_dist=True)
            self.log("min", batch[0].min(), reduce_fx="min", sync_dist=True)
            self.log_dict({"a": loss, "b": loss.square().sqrt()}, on_step=False, on_epoch=True, sync_dist=True)

    return {"metrics": run.fit(Logging, loaders=validated)["metrics"]}


class Hyper(Supervised):
    def __init__(self, lr: float = 0.05, loss_function: Any = None, options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


@row("`save_hyperparameters`, `load_from_checkpoint`", columns=ALL)
def hyperparameters(run: Run) -> dict[str, Any]:
    found = run.fit(lambda: Hyper(lr=0.1, options={"a": [1, 2]}), callbacks=[Saving(run, "x.ckpt")])
    loaded = Hyper.load_from_checkpoint(run.folder / "x.ckpt", map_location="cpu")
    return found | {"hparams": dict(loaded.hparams), "loaded": plain(loaded.state_dict())}


@row("`save_hyperparameters` with a module among the arguments")
def module_among(run: Run) -> dict[str, Any]:
    found = run.fit(lambda: Hyper(loss_function=nn.MSELoss()), callbacks=[Saving(run, "x.ckpt")])
    loaded = Hyper.load_from_checkpoint(run.folder / "x.ckpt", map_location="cpu", weights_only=False)
    return found | {"loss": type(loaded.hparams.loss_function).__name__, "loaded": plain(loaded.state_dict())}


@row("`save_hyperparameters(ignore=..., logger=False)`, `self.hparams` changed")
def ignored(run: Run) -> dict[str, Any]:
    class Ignoring(Supervised):
        def __init__(self, width: int = 7, name: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters(ignore="name", logger=False)
            self.hparams.width = 8

    found = run.fit(Ignoring, callbacks=[Saving(run, "x.ckpt")])
    return found | {"hparams": dict(Ignoring.load_from_checkpoint(run.folder / "x.ckpt").hparams)}


@fits("`self.freeze`, `self.unfreeze`", loaders=validated, trainer={"max_epochs": 2, "num_sanity_val_steps": 0})
class Freezing(Supervised):
    def on_validation_start(self) -> None:
        self.freeze()

    def on_validation_end(self) -> None:
        self.unfreeze()


@row("`example_input_array`, `to_torchscript` after `fit`")
def exported(run: Run) -> dict[str, Any]:
    module = run.module(Supervised)
    module.example_input_array = torch.ones(2, 5)
    found = run.fit(module, enable_model_summary=True)
    script = module.to_torchscript(method="trace")
    return found | {"output": script(torch.ones(1, 5)).detach()}


@row("the module by itself after `fit`: call, `state_dict`, `torch.save`, `deepcopy`")
def by_itself(run: Run) -> dict[str, Any]:
    import copy

    module = run.module(Supervised)
    found = run.fit(module)
    torch.save(module.state_dict(), run.folder / f"weights-{run.rank}.pt")
    loaded = Supervised()
    loaded.load_state_dict(torch.load(run.folder / f"weights-{run.rank}.pt"))
    copied = copy.deepcopy(module)
    inputs = torch.ones(2, 5)
    return found | {"outputs": [plain(each.eval()(inputs)) for each in (module, loaded, copied)]}


@fits("`configure_optimizers` returning `None`")
class Still(Supervised):
    def configure_optimizers(self) -> None:
        return None


@fits("an iterator in the step: `training_step(self, dataloader_iter)`", names="dataloader_iter")
class Drawing(Supervised):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@row("`self.log` in every hook that takes it")
def log_everywhere(run: Run) -> dict[str, Any]:
    hooks = (
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
    )
    hooks += ("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end")
    hooks += ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_end", "on_validation_epoch_end")

    def logging(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> None:
            self.log(name, float(self.global_step + 1), sync_dist=True)

        return hook

    made = type("Logging", (Supervised,), {name: logging(name) for name in hooks})
    return {"metrics": run.fit(made, loaders=validated, max_epochs=2)["metrics"]}
