"""Unused networks, classes that resist subclassing, precision, and layers that Lightning replaces."""

import abc
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy
from tests.models.blocks import GAN, Block, Tied
from tests.models.tokens import LENGTH, VOCABULARY, Fitted, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 4
T = TypeVar("T")


class GANWithTail(GAN):
    """Has an unused network without an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(3, 3)


def fit_gan_without_finding_unused() -> str:
    strategy = ParalDDPStrategy(find_unused_parameters=False)
    with pytest.raises(RuntimeError) as caught:
        fit(GANWithTail, NUM_BATCHES, 2, strategy=strategy)
    return str(caught.value)


def test_parameters_that_are_not_toggled_are_named(on_ranks) -> None:
    for message in on_ranks(2, fit_gan_without_finding_unused):
        assert "discriminator.0.weight, discriminator.0.bias" in message
        assert "tail.weight" in message
        assert "generator" not in message
        assert "find_unused_parameters=True" in message


# Classes under FSDP


class Keyed(nn.Linear):
    def __init_subclass__(cls, *, key: str) -> None:
        cls.key = key


class Known(type):
    names: ClassVar[list[str]] = []

    def __new__(mcs, name: str, bases: Any, attributes: Any) -> Any:
        assert name not in mcs.names
        mcs.names.append(name)
        return super().__new__(mcs, name, bases, attributes)


class KeyedOnce(Keyed, key="once"):
    pass


class Registered(nn.Linear, metaclass=Known):
    pass


class Abstract(nn.Linear, abc.ABC):
    pass


class Slotted(nn.Linear):
    __slots__ = ("extra",)


class GenericFirst(Generic[T], nn.Linear):
    pass


class GenericLast(nn.Linear, Generic[T]):
    pass


class Parametrized(GenericFirst[int]):
    pass


class WithNew(nn.Linear):
    def __new__(cls, rows: int, columns: int) -> Any:
        return super().__new__(cls)


KINDS = (KeyedOnce, Registered, Abstract, Slotted, GenericFirst, GenericLast, Parametrized, WithNew)


class Base(Generic[T], Fitted):
    pass


class AllKinds(Base[int]):
    """Has layers of classes that resist subclassing, or notice it."""

    expected_name = "AllKinds"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(kind(LENGTH, LENGTH) for kind in KINDS))

    def loss(self, batch: list[Tensor]) -> Tensor:
        assert [type(layer).__name__ for layer in self.layers] == [kind.__name__ for kind in KINDS]
        assert all(isinstance(layer, kind) for layer, kind in zip(self.layers, KINDS, strict=True))
        assert (type(self).__module__, type(self).__qualname__) == (__name__, self.expected_name)
        return self.layers(batch[0].float() / VOCABULARY).square().mean()


class KeepsShardedClasses(AllKinds):
    expected_name = "KeepsShardedClasses"

    def on_train_start(self) -> None:
        assert all(isinstance(layer, FSDPModule) for layer in self.layers)
        assert str(self.layers[0]) == "KeyedOnce(in_features=6, out_features=6, bias=True)"


def fit_all_kinds(num_ranks: int) -> Any:
    fitted = fit(KeepsShardedClasses, NUM_BATCHES, num_ranks, strategy=ParalFSDPStrategy(units=[nn.Linear]))
    assert KeyedOnce.key == "once"
    return fitted


def test_modules_of_any_class_are_sharded_under_their_own_names(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_all_kinds, 2), fit(AllKinds, NUM_BATCHES, 1))


# Outputs of steps under FSDP


class WithoutLoss(Tied):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"total": self.loss(batch)}


def fit_without_loss() -> None:
    with pytest.raises(MisconfigurationException, match="'loss' key needs to be present"):
        fit(WithoutLoss, 1, 1, strategy="paral_fsdp")


def test_step_without_loss_raises_the_error_of_lightning(on_ranks) -> None:
    on_ranks(1, fit_without_loss)


# Precision under FSDP


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
