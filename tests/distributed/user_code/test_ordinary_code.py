"""Precision of weights under FSDP, and layers that Lightning replaces."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn

from tests.models.blocks import Block, Tied
from tests.models.tokens import LENGTH, Fitted, fit, token_loader
from tests.running import quiet_trainer

NUM_BATCHES = 4


class BuiltLater(Tied):
    """Builds layers in `configure_model`, whose values are drawn unit by unit under FSDP."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def fit_on_rank(make: Any, num_ranks: int, options: dict[str, Any]) -> Any:
    return fit(make, NUM_BATCHES, num_ranks, **options)


@pytest.mark.parametrize(
    ("make", "precision", "tolerance"),
    [(Tied, "64-true", 1e-12), (Tied, "16-true", 2e-2), (BuiltLater, "64-true", 1e-12)],
)
def test_precision_of_weights_equals_one_process(on_ranks, make: Any, precision: str, tolerance: float) -> None:
    options = {"precision": precision, "gradient_clip_val": 0.05}
    _, expected = fit_on_rank(make, 1, options)
    for _, weights in on_ranks(2, fit_on_rank, make, 2, options | {"strategy": "paral_fsdp"}):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=tolerance)


# Layers that Lightning replaces


class Normalizes(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.norm(batch[0].float()).square().mean()


class Halves(LayerSync):
    """Replaces a layer during the fit, like the synchronization of batch normalization."""

    def apply(self, model: Any) -> Any:
        model.before, model.norm = [model.norm], nn.LayerNorm(LENGTH)
        return model

    def revert(self, model: Any) -> Any:
        (model.norm,) = model.before
        return model


class Synchronized(Normalizes):
    def on_train_start(self) -> None:
        assert isinstance(self.norm, nn.LayerNorm)


def fit_with_layer_sync(strategy: str) -> list[str]:
    torch.manual_seed(5)
    model = Synchronized()
    quiet_trainer(max_epochs=1, devices=2, strategy=strategy, plugins=[Halves()]).fit(model, token_loader(2, 2))
    return [type(part).__name__ for part in model.children()]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_layers_are_synchronized_during_the_fit_under_every_strategy(on_ranks, strategy: str) -> None:
    assert on_ranks(2, fit_with_layer_sync, strategy) == [["BatchNorm1d"]] * 2
