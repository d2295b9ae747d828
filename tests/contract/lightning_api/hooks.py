"""Rows for every hook of LightningModule and Callback: the order of calls, and the effects of overridden hooks."""

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.core.hooks import ModelHooks

from tests.contract.lightning_api.rows import ALL, LIGHT, fits, row
from tests.contract.tables.run import Run, Saving, plain
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


@row("`on_exception`", columns=LIGHT)
def exception(run: Run) -> dict[str, Any]:
    class Failing(Supervised):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ArithmeticError("of the user")

    seen: list[str] = []

    class Noting(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            seen.append(str(exception))

        def teardown(self, *args: Any, **kwargs: Any) -> None:
            seen.append("teardown")

    try:
        run.fit(Failing, callbacks=[Noting()])
        raised = "nothing"
    except ArithmeticError as error:
        raised = str(error)
    return {"raised": raised, "seen": seen}


@fits("`on_train_batch_start` returning -1", columns=LIGHT, trainer={"max_epochs": 2})
class Skipping(Supervised):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


@fits("`optimizer_step` overridden: warm-up of the learning rate", columns=ALL)
class Warming(Supervised):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)


@row("`lr_scheduler_step` overridden")
def stepping(run: Run) -> dict[str, Any]:
    class Stepping(Stepped):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            scheduler.step()

    found = run.fit(Stepping, max_epochs=2)
    return found | {"lr": run.last.optimizers[0].param_groups[0]["lr"]}


@fits("`on_before_backward`, `on_after_backward`, `on_before_zero_grad` with effect", columns=ALL)
class Around(Supervised):
    def on_before_backward(self, loss: Any) -> None:
        self.seen.append(loss.requires_grad)

    def on_after_backward(self) -> None:
        self.seen.append([self.global_step])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(len(optimizer.param_groups))


@row("`configure_callbacks`", columns=LIGHT)
def own_callbacks(run: Run) -> dict[str, Any]:
    class Counting(Callback):
        count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

    counting = Counting()

    class Configuring(Supervised):
        def configure_callbacks(self) -> Any:
            return counting

    return run.fit(Configuring) | {"count": counting.count}


@fits("`configure_model`", columns=ALL)
class Building(Supervised):
    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            generator = torch.Generator().manual_seed(4)
            self.head = torch.nn.Linear(7, 3)
            torch.nn.init.normal_(self.head.weight, generator=generator)
            torch.nn.init.zeros_(self.head.bias)


@row("`setup`, `teardown`, with the stage", columns=LIGHT)
def stages(run: Run) -> dict[str, Any]:
    class Staged(Stepped):
        def setup(self, stage: str) -> None:
            self.seen.append(("setup", stage, self.trainer.state.fn.value))

        def teardown(self, stage: str) -> None:
            self.seen.append(("teardown", stage))

    module = run.module(Staged)
    run.fit(module)
    run.trainer().validate(module, run.data()["train_dataloaders"], verbose=False)
    return {"seen": plain(module.seen)}
