"""Rows for the Tuner."""

from typing import Any

import torch
from lightning.pytorch.tuner import Tuner

from tests.contract.lightning_api.callbacks import WithLoader
from tests.contract.lightning_api.rows import ALL, row
from tests.contract.tables.run import Run, plain
from tests.contract.user_code.models import Supervised


class Rated(Supervised):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


@row("`Tuner.lr_find`", columns=ALL, reference="ddp")
def lr_find(run: Run) -> dict[str, Any]:
    module, trainer = run.module(Rated), run.trainer(max_epochs=9)
    found = Tuner(trainer).lr_find(
        module, **run.data(), min_lr=1e-4, max_lr=0.1, num_training=20, early_stop_threshold=None
    )
    assert found is not None
    return {"tried": found.results["lr"], "set": module.hparams.lr, "weights": plain(module.state_dict())}


@row("`Tuner.lr_find`, then `fit`", columns=ALL)
def lr_find_and_fit(run: Run) -> dict[str, Any]:
    module, trainer = run.module(Rated), run.trainer()
    Tuner(trainer).lr_find(module, **run.data(), num_training=4, update_attr=False)
    torch.manual_seed(1)
    trainer.fit(module, **run.data())
    return {"weights": plain(module.state_dict()), "steps": trainer.global_step}


def scaled(mode: str) -> Any:
    def scenario(run: Run) -> dict[str, Any]:
        module, trainer = run.module(WithLoader), run.trainer()
        found = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=1, init_val=4, max_trials=2)
        return {"found": found, "set": module.batch_size, "weights": plain(module.state_dict())}

    return scenario


for mode in ("power", "binsearch"):
    row(f'`Tuner.scale_batch_size("{mode}")`', reference="ddp", names="batch size")(scaled(mode))
