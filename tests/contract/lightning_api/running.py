"""Rows for runs of the Trainer: fit, validate, test, predict, resumed and repeated."""

import copy
import pickle
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar

from lightning_paral import ParalError
from tests.contract.lightning_api.rows import ALL, LIGHT, RANKS, fits, row
from tests.contract.tables.run import Mean, OfRankZero, Run, Saving, plain
from tests.contract.user_code.models import Every, Supervised, regression, validated


class Scheduled(Every):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@row("`trainer.fit(ckpt_path=...)`, between epochs", columns=ALL)
def resumed(run: Run) -> dict[str, Any]:
    if run.num_devices == 1:
        found = run.fit(Scheduled, max_epochs=2, callbacks=[Saving(run, "second.ckpt")])
    else:
        run.fit(Scheduled, callbacks=[Saving(run, "first.ckpt")])
        how = {"ckpt_path": run.folder / "first.ckpt"}
        found = run.fit(Scheduled, max_epochs=2, how=how, callbacks=[Saving(run, "second.ckpt")])
    saved = run.saved(run.folder / "second.ckpt")
    if saved.value is not None:
        del saved.value["callbacks"]
    return {"weights": found["weights"], "steps": found["steps"], "saved": saved}


@row("`trainer.fit(ckpt_path=...)`, within an epoch")
def resumed_within(run: Run) -> dict[str, Any]:
    saving = ModelCheckpoint(run.folder / "kept", every_n_train_steps=3)
    run.fit(Scheduled, callbacks=[saving], max_steps=3, max_epochs=2, enable_checkpointing=True)
    found = run.fit(Scheduled, max_epochs=2, how={"ckpt_path": saving.best_model_path})
    return {"weights": found["weights"], "steps": found["steps"]}


@row('`ckpt_path="last"` of `fit`, `"best"` of `test`')
def by_word(run: Run) -> dict[str, Any]:
    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(run.folder / "kept", monitor="val_loss", save_last=True)

    run.fit(Scheduled, loaders=validated, callbacks=[saving()], enable_checkpointing=True)
    how = {"ckpt_path": "last"}
    kept = saving()
    found = run.fit(Scheduled, validated, [kept], how, enable_checkpointing=True, max_epochs=2)
    logged = run.last.test(ckpt_path="best", dataloaders=run.data()["train_dataloaders"])
    return found | {"tested": logged, "best": str(kept.best_model_path).replace(str(run.folder), "")}


@row("`trainer.validate`, `test`, `predict` of a checkpoint", covers=("test_step", "predict_step"))
def evaluated(run: Run) -> dict[str, Any]:
    run.fit(Scheduled, callbacks=[Saving(run, "x.ckpt")])
    loader, trainer = run.data()["train_dataloaders"], run.trainer()
    module = Scheduled()
    path = run.folder / "x.ckpt"
    logged = [trainer.validate(module, loader, ckpt_path=path), trainer.test(module, loader, ckpt_path=path)]
    predicted = trainer.predict(module, loader, ckpt_path=path)
    return {"logged": logged, "predicted": Mean(float(torch.cat(predicted).mean()))}


@row("`trainer.predict`: what it returns on all ranks")
def predicted(run: Run) -> dict[str, Any]:
    loader = torch.utils.data.DataLoader(regression(0, 1)["train_dataloaders"].dataset, 7)
    found = run.trainer().predict(run.module(Scheduled), loader)
    return {"predicted": sorted(sample for batch in run.of_all_ranks(found) for sample in batch.tolist())}


@row("`trainer.predict(return_predictions=False)`, several loaders")
def predicted_several(run: Run) -> dict[str, Any]:
    class Several(Scheduled):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self(batch[0])

        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((dataloader_idx, batch[0].sum().item()))

    loader = torch.utils.data.DataLoader(regression(0, 1)["train_dataloaders"].dataset, 7)
    module, trainer = run.module(Several), run.trainer()
    nothing = trainer.predict(module, [loader, loader], return_predictions=False)
    found = trainer.predict(module, [loader, loader])
    by_loader = [sorted(row for batch in run.of_all_ranks(each) for row in batch.tolist()) for each in found]
    return {"nothing": nothing, "predicted": by_loader, "seen": sorted(run.of_all_ranks(module.seen))}


@row("`trainer.fit` twice, then `validate`, one Trainer", columns=ALL)
def twice(run: Run) -> dict[str, Any]:
    module = run.module(Scheduled)
    found = run.fit(module, loaders=validated)
    run.last.fit_loop.max_epochs = 2
    run.last.fit(module, **run.data(validated))
    logged = run.last.validate(module, run.data()["train_dataloaders"])
    return found | {"weights": plain(module.state_dict()), "logged": logged, "steps": run.last.global_step}


@row("`trainer.should_stop = True` on one rank", reference="ddp")
def stopped(run: Run) -> dict[str, Any]:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.should_stop = True

    return run.fit(callbacks=[Stop()], max_epochs=3)


@fits("`trainer.estimated_stepping_batches`", columns=LIGHT, trainer={"max_epochs": 3, "accumulate_grad_batches": 2})
class Estimating(Supervised):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        self.seen.append(steps)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@row("`trainer.init_module()`")
def init_module(run: Run) -> dict[str, Any]:
    trainer = run.trainer()
    with trainer.init_module():
        module = run.module(Supervised)
    trainer.fit(module, **run.data())
    return {"weights": plain(module.state_dict())}


@row("what the Trainer says of the run", columns=LIGHT)
def says(run: Run) -> dict[str, Any]:
    said: dict[str, Any] = {}

    class Asking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            names = ("num_training_batches", "num_val_batches", "num_sanity_val_batches", "is_last_batch", "log_dir")
            said.update({name: str(getattr(trainer, name)).replace(str(run.folder), "") for name in names})
            said["zero"] = trainer.is_global_zero == (trainer.global_rank == 0)
            said["model"] = trainer.lightning_module is module
            said["loaders"] = (len(trainer.train_dataloader), type(trainer.val_dataloaders).__name__)

    return run.fit(loaders=validated, callbacks=[Asking()]) | {"said": said}


@row("`trainer.world_size`, `global_rank`, `num_devices`", columns=RANKS, reference="ddp")
def world(run: Run) -> dict[str, Any]:
    trainer = run.trainer()
    trainer.fit(run.module(Supervised), **run.data())
    names = ("world_size", "global_rank", "local_rank", "node_rank", "num_devices", "num_nodes", "is_global_zero")
    return {name: getattr(trainer, name) for name in names}


@row("`trainer.logged_metrics`, `callback_metrics`, `progress_bar_metrics`")
def metrics(run: Run) -> dict[str, Any]:
    class Logging(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("shown", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
            return loss

    run.fit(Logging, loaders=validated)
    names = ("logged_metrics", "callback_metrics", "progress_bar_metrics")
    # Values logged per step differ between ranks; values logged per epoch are means over all ranks.
    found = {name: {k: float(v) for k, v in getattr(run.last, name).items()} for name in names}
    return {name: Mean(values) for name, values in found.items()}


@row("`trainer.print`, `self.print`", columns=LIGHT)
def printing(run: Run) -> dict[str, Any]:
    import contextlib
    import io

    class Printing(Supervised):
        def on_train_start(self) -> None:
            self.print("of the module")
            self.trainer.print("of the trainer")

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run.fit(Printing)
    return {"printed": OfRankZero([line for line in text.getvalue().splitlines() if line.startswith("of the")])}


@fits("`trainer.strategy.barrier`, `reduce`, `broadcast`, `all_gather`", columns=RANKS, reference="ddp")
class Asking(Supervised):
    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        strategy.barrier("here")
        rank = torch.tensor(float(self.global_rank + 1))
        self.seen += [strategy.reduce(rank.clone()), strategy.reduce(rank.clone(), reduce_op="sum")]
        self.seen += [strategy.broadcast(self.global_rank), strategy.all_gather(rank), self.all_gather({"a": rank})]
        self.seen += [strategy.reduce_boolean_decision(self.global_rank == 0, all=False)]


@row("`seed_everything(workers=True)`: the same run twice", columns=LIGHT)
def seeded(run: Run) -> dict[str, Any]:
    def once() -> dict[str, Any]:
        seed_everything(5, workers=True, verbose=False)
        module = Supervised()
        dataset = regression(0, 1)["train_dataloaders"].dataset
        run.trainer(max_epochs=2).fit(module, torch.utils.data.DataLoader(dataset, 5, shuffle=True))
        return plain(dict(module.state_dict()))

    first, second = once(), once()
    return {"same": [name for name in first if not torch.equal(first[name], second[name])]}


@row("a checkpoint that is not there", columns=LIGHT, names="not|No such")
def missing(run: Run) -> dict[str, Any]:
    try:
        run.fit(how={"ckpt_path": run.folder / "nowhere.ckpt"})
    except (FileNotFoundError, ParalError) as error:
        return {"raised": isinstance(error, FileNotFoundError)}
    return {"raised": "nothing"}


@row("default logger and checkpoints: where files lie, and resuming from them")
def defaults(run: Run) -> dict[str, Any]:
    run.fit(Scheduled, logger=True, enable_checkpointing=True)
    path = run.last.checkpoint_callback.best_model_path
    how = {"ckpt_path": path}
    found = run.fit(Scheduled, max_epochs=2, how=how, logger=True, enable_checkpointing=True)
    files = sorted(each.relative_to(run.folder).as_posix() for each in run.folder.glob("**/*.ckpt"))
    return found | {"files": OfRankZero(files), "path": str(path).replace(str(run.folder), "")}


@row("`copy.deepcopy` and `pickle` of callbacks after `fit`")
def copied(run: Run) -> dict[str, Any]:
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(run.folder / "kept", monitor="val_loss"), TQDMProgressBar()]
    found = run.fit(
        loaders=validated, callbacks=callbacks, enable_checkpointing=True, enable_progress_bar=True, max_epochs=2
    )
    again = [pickle.loads(pickle.dumps(each)) for each in copy.deepcopy(callbacks)]
    return found | {"kinds": [type(each).__name__ for each in again], "best": float(again[1].best_model_score)}


@row("`copy.deepcopy` of the Trainer after `fit`")
def copied_trainer(run: Run) -> dict[str, Any]:
    run.fit(loaders=validated)
    again = copy.deepcopy(run.last)
    return {"steps": again.global_step, "metrics": Mean({k: float(v) for k, v in again.callback_metrics.items()})}
