"""Code of ordinary Lightning modules computes the same with layers that are split over tensor ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ActivationCheckpointing, ParalFSDPStrategy
from lightning_paral.diagnostics.rank_pool import RankError
from tests.running import quiet_trainer

WIDTH = 64
CLASSES = 80


class Net(LightningModule):
    """Layers of which `up` and `down` form a chain, and `mid` and `head` another."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = x + self.down(self.drop(self.act(self.up(x))))
        return self.head(torch.tanh(self.mid(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-2)


class SometimesOther(Net):
    """Every second step, and hooks, use features of a chain in ways that the first step does not show."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.norm(self.first(batch[0]))
        up = self.up(x)
        if batch_idx % 2:
            self.log("norm", up.detach().norm())
            self.log("active", (up > 0).float().mean())
            x = x + torch.tanh(up)[:, :WIDTH] + up.view(len(up), 2, WIDTH).mean(1)
        x = x + self.down(self.act(up))
        loss = functional.cross_entropy(self.head(torch.tanh(self.mid(x))), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_start(self) -> None:
        self.act.register_forward_hook(lambda _, inputs, output: self.seen.update(act=tuple(output.shape[1:])))

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.seen["up"] = self.up(torch.ones(2, WIDTH)) + 0.0
            self.seen["down"] = self.down(torch.ones(2, 2 * WIDTH))
            self.seen["out"] = self(torch.ones(2, 16)) + 0.0


def fit(strategy: Any, num_ranks: int, make: Callable[[], Net], epochs: int = 2) -> tuple[dict[str, Any], ...]:
    """Return the weights, the metrics and what the module has seen."""
    torch.manual_seed(1)
    module = make()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(36, 16, generator=generator)
    batches = DataLoader(TensorDataset(inputs, torch.randint(0, CLASSES, (36,), generator=generator)), 8)
    trainer = quiet_trainer(devices=num_ranks, strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0)
    trainer.fit(module, batches)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}, module.seen


def fit_split(num_ranks: int, make: Callable[[], Net], options: dict[str, Any]) -> Any:
    return fit(ParalFSDPStrategy(tensor_parallel=2, split="global", **options), num_ranks, make)


def test_step_equals_that_of_one_process(on_ranks) -> None:
    expected = fit("auto", 1, SometimesOther)

    for result in on_ranks(2, fit_split, 2, SometimesOther, {}):
        for found, reference in zip(result, expected, strict=True):
            assert found.keys() == reference.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5, msg=name)


def fit_with_dropout(num_ranks: int) -> dict[str, Tensor]:
    torch.seed()  # each rank draws other numbers, as without `seed_everything`
    return fit_split(num_ranks, _WithDropout, {})[0]


class _WithDropout(Net):
    def __init__(self) -> None:
        super().__init__(0.3)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        x = self.norm(self.first(functional.dropout(x, 0.1, self.training)))
        up = self.up(x)
        skip = functional.dropout(x, 0.1, self.training)  # of all features, while others are split
        x = skip + self.down(self.drop(self.act(up)))
        return self.head(torch.tanh(self.mid(x)))

    def on_train_batch_end(self, *_: Any) -> None:
        self.up(torch.ones(2, WIDTH))  # the beginning of a chain, without its end


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_weights_stay_equal_on_tensor_ranks_with_dropout(on_ranks, num_ranks: int) -> None:
    first, *others = on_ranks(num_ranks, fit_with_dropout, num_ranks)

    for other in others:
        for name, weight in other.items():
            assert torch.equal(weight, first[name]), name


def test_recomputing_a_layer_that_is_split_is_refused(on_ranks) -> None:
    options = {"activation_checkpointing": ActivationCheckpointing(units=["Linear"])}

    with pytest.raises(RankError, match="activation_checkpointing chooses up, a layer that is split"):
        on_ranks(2, fit_split, 2, Net, options)
