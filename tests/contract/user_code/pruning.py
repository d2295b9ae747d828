"""Rows about pruning with Lightning's callback and torch.nn.utils.prune."""

from typing import Any

from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.utils import prune

from tests.contract.user_code.models import Supervised
from tests.contract.user_code.rows import add, row


def pruning(**options: Any) -> Any:
    def make() -> list[Any]:
        return [ModelPruning(**({"pruning_fn": "l1_unstructured", "amount": 0.3} | options))]

    return make


add(
    "pruning by ModelPruning",
    "ModelPruning('l1_unstructured', amount=0.3).",
    Supervised,
    callbacks=pruning(),
    trainer={"max_epochs": 2},
)
add(
    "pruning by ModelPruning, lottery ticket",
    "ModelPruning(use_lottery_ticket_hypothesis=True).",
    Supervised,
    callbacks=pruning(use_lottery_ticket_hypothesis=True),
    trainer={"max_epochs": 2},
)
add(
    "pruning by ModelPruning, not permanent",
    "ModelPruning(make_pruning_permanent=False).",
    Supervised,
    callbacks=pruning(make_pruning_permanent=False),
    trainer={"max_epochs": 2},
)
add(
    "pruning by ModelPruning, structured",
    "ModelPruning('ln_structured', pruning_dim=0, pruning_norm=2).",
    Supervised,
    callbacks=pruning(
        pruning_fn="ln_structured",
        parameter_names=["weight"],
        use_global_unstructured=False,
        pruning_dim=0,
        pruning_norm=2,
    ),
    trainer={"max_epochs": 2},
)


@row("pruning in __init__")
class PrunedBefore(Supervised):
    """torch.nn.utils.prune.l1_unstructured of layers in __init__."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.head, self.backbone.blocks[0].layer):
            prune.l1_unstructured(layer, "weight", 0.3)


@row("pruning in a hook", trainer={"max_epochs": 2})
class PrunedInHook(Supervised):
    """torch.nn.utils.prune.l1_unstructured in on_train_epoch_end."""

    def on_train_epoch_end(self) -> None:
        prune.l1_unstructured(self.head, "weight", 0.3)
        prune.l1_unstructured(self.backbone.blocks[0].layer, "weight", 0.3)


@row("pruning made permanent")
class Permanent(PrunedBefore):
    """prune.remove in on_train_epoch_end."""

    def on_train_epoch_end(self) -> None:
        for layer in (self.head, self.backbone.blocks[0].layer):
            prune.remove(layer, "weight")


@row("parametrization added in on_fit_start")
class ParametrizedLater(Supervised):
    """register_parametrization of weight_norm in on_fit_start."""

    def on_fit_start(self) -> None:
        nn.utils.parametrizations.weight_norm(self.head)


@row("parametrization added during the run", trainer={"max_epochs": 2})
class ParametrizedInEpoch(Supervised):
    """register_parametrization in on_train_epoch_start of the second epoch (Dropconnect, quantization)."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            nn.utils.parametrize.register_parametrization(self.head, "weight", Rounded())


class Rounded(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + ((x * 8).round() / 8 - x).detach()


add("callback WeightAveraging", "Lightning's WeightAveraging.", Supervised, callbacks=lambda: [WeightAveraging()])
add(
    "callback StochasticWeightAveraging",
    "StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1).",
    Supervised,
    callbacks=lambda: [StochasticWeightAveraging(0.05, 1)],
    trainer={"max_epochs": 3},
)
