"""Rows for every hook of LightningModule and Callback: the order of calls, and the effects of overridden hooks."""

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.core.hooks import ModelHooks

from tests.contract.lightning_api.rows import ALL, LIGHT, fits, row
from tests.contract.tables.run import OfRankZero, Run, Saving
from tests.contract.user_code.models import Every, Supervised, validated

OLD = ("configure_sharded_model",)
MODEL_HOOKS = tuple(name for name in vars(ModelHooks) if not name.startswith("_") and name not in OLD)
MODULE_HOOKS = (
    *MODEL_HOOKS,
    "setup",
    "teardown",
    "prepare_data",
    "configure_callbacks",
    "configure_optimizers",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "lr_scheduler_step",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
NOT_HOOKS = ("state_key", "state_dict", "load_state_dict")
CALLBACK_HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in NOT_HOOKS)


def recording(base: type, names: tuple[str, ...], called: list[str]) -> type:
    """Return a subclass that records the calls of hooks."""

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    return type("Recording", (base,), {name: noting(name) for name in names})


class Stepped(Every):
    """Also has a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def all_stages(run: Run, module: Any, callbacks: list[Callback], called: list[str]) -> dict[str, Any]:
    run.fit(module, loaders=validated, callbacks=[*callbacks, Saving(run, "x.ckpt")], accumulate_grad_batches=2)
    loader, trainer = run.data()["train_dataloaders"], run.trainer(callbacks=callbacks)
    fit = list(called)
    trainer.validate(module, loader, ckpt_path=run.folder / "x.ckpt")
    trainer.test(module, loader)
    trainer.predict(module, loader)
    return {"in fit": fit, "in evaluation": called[len(fit) :]}


@row("all hooks of LightningModule: order of calls", covers=MODULE_HOOKS, reference="ddp")
def hooks_of_modules(run: Run) -> dict[str, Any]:
    called: list[str] = []
    return all_stages(run, run.module(recording(Stepped, MODULE_HOOKS, called)), [], called)


@row("all hooks of Callback: order of calls", covers=CALLBACK_HOOKS)
def hooks_of_callbacks(run: Run) -> dict[str, Any]:
    called: list[str] = []
    made = recording(Callback, CALLBACK_HOOKS, called)()
    return all_stages(run, run.module(Stepped), [made], called)


@fits("`on_train_batch_start` returning -1", columns=LIGHT, trainer={"max_epochs": 2})
class Skipping(Supervised):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


@fits("`optimizer_zero_grad` overridden: `set_to_none=False`", columns=ALL)
class Zeroing(Supervised):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@row("`on_save_checkpoint`, `on_load_checkpoint` with what is theirs")
def own_checkpoint(run: Run) -> dict[str, Any]:
    class Own(Supervised):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["user_own"] = {"tensor": torch.arange(3), "epoch": checkpoint["epoch"]}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint["user_own"])

    run.fit(Own, callbacks=[Saving(run, "x.ckpt")])
    found = run.fit(Own, max_epochs=2, how={"ckpt_path": run.folder / "x.ckpt"})
    return found | {"saved": OfRankZero(run.rank or run.saved(run.folder / "x.ckpt").value["user_own"])}
