"""A module for tests of weight averaging, and a function that fits it."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.models.regression import FEATURES, regression_data
from tests.running import quiet_trainer

NUM_BATCHES = 5
MAX_EPOCHS = 3
SAVED_AFTER_EPOCH = 1


class Averaged(LightningModule):
    """Tied, frozen and 0-dimensional parameters, parameters with fewer elements than ranks, and a changing buffer."""

    steps: Tensor

    def __init__(self, with_norm: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.first = nn.Linear(7, 7, bias=False)
        self.second = nn.Linear(7, 7, bias=not with_norm)  # a bias before `norm` gets only rounding errors as gradient
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7) if with_norm else nn.Identity()
        self.out = nn.Linear(7, 2)
        self.one = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.register_buffer("steps", torch.zeros(2))
        self.validated: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(self.frozen(torch.tanh(self.hidden(x))))))
        outputs = self.out(torch.tanh(self.norm(x))) * self.scale
        return outputs + self.one(outputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1]) + self.steps.sum()
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-2)


class SaveAfterEpoch(Callback):
    """Saves in the same hook as `ModelCheckpoint`, after an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == SAVED_AFTER_EPOCH:
            trainer.save_checkpoint(self.path)


def fit(
    strategy: Any,
    num_ranks: int,
    callback: Callback | None,
    *,
    module: Averaged | None = None,
    save_to: Path | None = None,
    resume_from: Path | None = None,
    with_norm: bool = False,
    num_batches: int = NUM_BATCHES,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """Fit; return the final weights and the validation loss of each epoch."""
    torch.manual_seed(3)
    module = Averaged(with_norm) if module is None else module
    callbacks = [
        *([callback] if callback else []),
        *options.pop("callbacks", []),
        *([SaveAfterEpoch(save_to)] if save_to else []),
    ]
    options = {"max_epochs": MAX_EPOCHS, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(devices=num_ranks, strategy=strategy, callbacks=callbacks, **options)
    num_loading = 1 if strategy == "paral_dp" else num_ranks
    trainer.fit(
        module,
        regression_data(num_batches, num_loading),
        regression_data(2, num_loading),
        ckpt_path=None if resume_from is None else str(resume_from),
    )
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, module.validated
