"""Rows about pruning with Lightning's callback and torch.nn.utils.prune."""

from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.utils import prune

from tests.contract.user_code.models import Supervised
from tests.contract.user_code.rows import add, row

add(
    "pruning by ModelPruning",
    "ModelPruning('l1_unstructured', amount=0.3).",
    Supervised,
    callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.3)],
    trainer={"max_epochs": 2},
    names="weight_orig",
)


@row("pruning in __init__")
class PrunedBefore(Supervised):
    """torch.nn.utils.prune.l1_unstructured of layers in __init__."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.head, self.backbone.blocks[0].layer):
            prune.l1_unstructured(layer, "weight", 0.3)


@row("pruning in a hook", trainer={"max_epochs": 2}, names="weight_orig")
class PrunedInHook(Supervised):
    """torch.nn.utils.prune.l1_unstructured in on_train_epoch_end."""

    def on_train_epoch_end(self) -> None:
        prune.l1_unstructured(self.head, "weight", 0.3)
        prune.l1_unstructured(self.backbone.blocks[0].layer, "weight", 0.3)


@row("pruning made permanent", names="head|weight_orig")
class Permanent(PrunedBefore):
    """prune.remove in on_train_epoch_end."""

    def on_train_epoch_end(self) -> None:
        for layer in (self.head, self.backbone.blocks[0].layer):
            prune.remove(layer, "weight")


@row("parametrization added in on_fit_start", names="head|parametrizations")
class ParametrizedLater(Supervised):
    """register_parametrization of weight_norm in on_fit_start."""

    def on_fit_start(self) -> None:
        nn.utils.parametrizations.weight_norm(self.head)


add("callback WeightAveraging", "Lightning's WeightAveraging.", Supervised, callbacks=lambda: [WeightAveraging()])
add(
    "callback StochasticWeightAveraging",
    "StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1).",
    Supervised,
    callbacks=lambda: [StochasticWeightAveraging(0.05, 1)],
    trainer={"max_epochs": 3},
)
