"""Rows for callbacks that save, and for their state in checkpoints."""

import json
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from tests.contract.lightning_api.callbacks import Scheduled
from tests.contract.lightning_api.rows import ALL, LIGHT, row
from tests.contract.tables.run import OfRankZero, Run, Saving, plain
from tests.contract.user_code.models import Supervised, validated


@row("`ModelCheckpoint`: best, last, top k", columns=ALL, covers=("Checkpoint",))
def checkpoint(run: Run) -> dict[str, Any]:
    saving = ModelCheckpoint(run.folder / "kept", "{epoch}-{step}", "val_loss", save_top_k=2, save_last=True)
    found = run.fit(loaders=validated, callbacks=[saving], enable_checkpointing=True, max_epochs=3)
    assert isinstance(saving, Checkpoint)
    names = sorted(path.name for path in (run.folder / "kept").iterdir())
    return found | {
        "files": OfRankZero(names),
        "best": (str(saving.best_model_path).replace(str(run.folder), ""), float(saving.best_model_score)),
        "saved": run.saved(run.folder / "kept" / "last.ckpt"),
    }


@row("`ModelCheckpoint(every_n_train_steps=2, save_weights_only=True)`")
def every_n_steps(run: Run) -> dict[str, Any]:
    saving = ModelCheckpoint(run.folder / "kept", every_n_train_steps=2, save_top_k=-1, save_weights_only=True)
    found = run.fit(callbacks=[saving], enable_checkpointing=True)
    names = sorted(path.name for path in (run.folder / "kept").iterdir())
    return found | {"files": OfRankZero(names), "saved": run.saved(run.folder / "kept" / names[0])}


class Failing(Supervised):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            raise ArithmeticError("of the user")
        return super().training_step(batch, batch_idx)


@row("`OnExceptionCheckpoint`", columns=ALL)
def exception_checkpoint(run: Run) -> dict[str, Any]:
    try:
        run.fit(Failing, callbacks=[OnExceptionCheckpoint(run.folder, "failed")], enable_checkpointing=True)
        raised = "nothing"
    except ArithmeticError as error:
        raised = str(error)
    return {"raised": raised, "saved": run.saved(run.folder / "failed.ckpt")}


@row("a callback with state, over a resume")
def state(run: Run) -> dict[str, Any]:
    class Stateful(Callback):
        def __init__(self) -> None:
            self.steps, self.order = 0, []

        def on_train_batch_end(self, *args: Any) -> None:
            self.steps += 1

        def setup(self, *args: Any, **kwargs: Any) -> None:
            self.order.append(("setup", self.steps))

        def on_fit_start(self, *args: Any) -> None:
            self.order.append(("on_fit_start", self.steps))

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]
            self.order.append(("load_state_dict", self.steps))

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["user_own"] = json.dumps(self.steps)

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.order.append(("on_load_checkpoint", checkpoint["user_own"]))

    run.fit(callbacks=[Stateful(), Saving(run, "x.ckpt")])
    second = Stateful()
    found = run.fit(callbacks=[second], max_epochs=2, how={"ckpt_path": run.folder / "x.ckpt"})
    return found | {"order": plain(second.order), "steps of it": second.steps}


@row('`ModelCheckpoint(save_last="link")`, resumed from it')
def linked(run: Run) -> dict[str, Any]:
    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(run.folder / "kept", save_last="link")

    run.fit(Scheduled, callbacks=[saving()], enable_checkpointing=True)
    link = run.folder / "kept" / "last.ckpt"
    kind = OfRankZero(link.is_symlink())
    found = run.fit(
        Scheduled, callbacks=[saving()], enable_checkpointing=True, max_epochs=2, how={"ckpt_path": str(link)}
    )
    names = sorted(path.name for path in (run.folder / "kept").iterdir())
    return found | {"link": kind, "files": OfRankZero(names)}


@row("`ModelCheckpoint`: a name that is taken, `train_time_interval`, `save_top_k=0`", columns=LIGHT)
def named(run: Run) -> dict[str, Any]:
    kept = [
        ModelCheckpoint(run.folder / "kept", "same"),
        ModelCheckpoint(run.folder / "timed", train_time_interval=timedelta(seconds=0)),
        ModelCheckpoint(run.folder / "none", save_top_k=0),
    ]
    for _ in range(2):
        run.fit(callbacks=kept[:1], enable_checkpointing=True)
    found = run.fit(callbacks=kept[1:], enable_checkpointing=True)
    return found | {"files": OfRankZero(sorted(path.name for path in run.folder.glob("*/*.ckpt")))}
