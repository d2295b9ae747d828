"""Ordinary Lightning code gives the results of one process, or is refused with a reason before it starts."""

import abc
import copy
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_full_backward_hook
from torchmetrics import Metric

from lightning_paral import ConfigurationError, ParalDDPStrategy, ParalFSDPStrategy
from tests.models.blocks import GAN, WIDTH, Block, Tied
from tests.models.tokens import LENGTH, VOCABULARY, Fitted, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 4
T = TypeVar("T")


def refusal_of_fit(make: Callable[[], LightningModule], **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(max_epochs=1, **options).fit(make(), token_loader(NUM_BATCHES, 2))
    return str(caught.value)


# Several optimizers under DDP


class GANWithTail(GAN):
    """Has an unused network without an optimizer, and a network that is unfrozen after DDP is constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.head.requires_grad_(False)
        self.tail = nn.Linear(3, 3)

    def on_train_start(self) -> None:
        self.head.requires_grad_(True)


def fit_gan(num_ranks: int, **options: Any) -> Any:
    return fit(GANWithTail, NUM_BATCHES, num_ranks, **options)


def fit_gan_on_rank(num_ranks: int) -> Any:
    return fit_gan(num_ranks, strategy="paral_ddp")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gan_under_ddp_trains_as_in_one_process(on_ranks, num_ranks: int) -> None:
    assert_same_fit(on_ranks(num_ranks, fit_gan_on_rank, num_ranks), fit_gan(1))


class Wasserstein(GANWithTail):
    """Toggles nothing, so losses reach the other network. Steps the critic, with a penalty, twice per batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0].float() / VOCABULARY
        for_generator, for_critic = self.optimizers()
        for _ in range(2):
            between = (real + self.generate(real).detach()).requires_grad_(True)
            slope = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)[0]
            distance = self.discriminator(self.generate(real).detach()).mean() - self.discriminator(real).mean()
            for_critic.zero_grad()
            self.manual_backward(distance + slope.square().sum(dim=1).mean())
            for_critic.step()
        if batch_idx % 2:
            for_generator.zero_grad()
            loss = -self.discriminator(self.generate(real)).mean()
            self.losses.append(loss.item())
            self.manual_backward(loss)
            for_generator.step()


def fit_wasserstein_on_rank() -> Any:
    return fit(Wasserstein, NUM_BATCHES, 2, strategy="paral_ddp")


def test_gan_without_toggling_under_ddp_trains_as_in_one_process(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_wasserstein_on_rank), fit(Wasserstein, NUM_BATCHES, 1))


def fit_gan_without_finding_unused() -> str:
    strategy = ParalDDPStrategy(find_unused_parameters=False)
    with pytest.raises(RuntimeError) as caught:
        fit_gan(2, strategy=strategy)
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


# Outputs, copies and hooks in steps under FSDP


class WithoutLoss(Tied):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"total": self.loss(batch)}


def fit_without_loss() -> None:
    with pytest.raises(MisconfigurationException, match="'loss' key needs to be present"):
        fit(WithoutLoss, 1, 1, strategy="paral_fsdp")


def test_step_without_loss_raises_the_error_of_lightning(on_ranks) -> None:
    on_ranks(1, fit_without_loss)


class KeepsBest(Tied):
    """Copies its weights in one hook, and restores them in another."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.best = [copy.deepcopy(self.state_dict())]
        if batch_idx == 2:
            self.load_state_dict(self.best[0])


class CopiesUnit(Tied):
    def loss(self, batch: list[Tensor]) -> Tensor:
        copy.deepcopy(self.blocks[0])
        return super().loss(batch)


def fit_on_rank(make: Any, num_ranks: int, options: dict[str, Any]) -> Any:
    return fit(make, NUM_BATCHES, num_ranks, **options)


def test_copied_state_is_restored_under_fsdp(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_on_rank, KeepsBest, 2, {"strategy": "paral_fsdp"}), fit(KeepsBest, NUM_BATCHES, 1))


def test_copying_a_unit_in_a_step_is_refused(on_ranks) -> None:
    options = {"strategy": "paral_fsdp", "devices": 2}
    for message in on_ranks(2, _refusal_on_rank, CopiesUnit, options):
        assert "was copied with copy.deepcopy" in message


def _refusal_on_rank(make: Any, options: dict[str, Any]) -> str:
    return refusal_of_fit(make, **options)


class WatchesGradients(Tied):
    """Has backward hooks on one unit and on all modules."""

    def on_fit_start(self) -> None:
        self.seen: list[Tensor] = []
        self.handles = [
            self.blocks[0].register_full_backward_hook(self._see),
            register_module_full_backward_hook(self._see_norms),
        ]

    def _see(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen += [inputs[0].clone(), outputs[0].clone()]

    def _see_norms(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(module, nn.LayerNorm):
            self.seen.append(outputs[0].clone())

    def on_fit_end(self) -> None:
        for handle in self.handles:
            handle.remove()


def watch_gradients(num_ranks: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(5)
    model = WatchesGradients()
    quiet_trainer(max_epochs=1, devices=num_ranks, **options).fit(model, token_loader(2, num_ranks))
    return model.seen


def watch_gradients_on_rank(strategy: str) -> list[Tensor]:
    return watch_gradients(2, strategy=strategy)


def test_backward_hooks_of_modules_see_the_same_under_fsdp_as_under_ddp(on_ranks) -> None:
    for seen, expected in zip(
        on_ranks(2, watch_gradients_on_rank, "paral_fsdp"),
        on_ranks(2, watch_gradients_on_rank, "paral_ddp"),
        strict=True,
    ):
        assert len(expected) > 2
        torch.testing.assert_close(seen, expected)


class WatchesParameters(Tied):
    """Sets hooks on parameters before and during the fit, like an experiment tracker; some change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for parameter in [self.embedding.weight, *self.blocks[0].parameters()]:
            parameter.register_hook(self._see)
        self.blocks[1].up.weight.register_hook(lambda gradient: gradient * 0.5)
        self.removed = self.blocks[1].up.weight.register_hook(lambda gradient: gradient * 0.0)

    def on_train_start(self) -> None:
        self.removed.remove()
        self.blocks[2].norm.weight.register_hook(self._see)

    def loss(self, batch: list[Tensor]) -> Tensor:
        if not self.losses:
            self.embedding.weight.register_hook(lambda gradient: gradient + 0.01)
            self.embedding.weight.register_hook(self._see)
        return super().loss(batch)

    def _see(self, gradient: Tensor) -> None:
        assert type(gradient) is Tensor
        self.seen.append(gradient.clone())


def watch_parameters(num_ranks: int, **options: Any) -> Any:
    torch.manual_seed(5)
    model = WatchesParameters()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, **options)
    trainer.fit(model, token_loader(NUM_BATCHES, num_ranks))
    num_seen = len(model.seen)
    model.loss([torch.zeros(1, LENGTH, dtype=torch.int64)]).backward()  # hooks stay after the run
    seen = sorted(model.seen, key=lambda gradient: (gradient.numel(), float(gradient.double().sum())))
    return num_seen, seen, {name: value.detach().clone() for name, value in model.state_dict().items()}


def watch_parameters_on_rank(strategy: Any, options: dict[str, Any]) -> Any:
    return watch_parameters(2, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("paral_fsdp", {}),
        ("paral_fsdp_offload", {"accumulate_grad_batches": 2}),
        (ParalFSDPStrategy(accumulate="unsharded", units=[nn.Linear]), {"accumulate_grad_batches": 2}),
    ],
    ids=["each step", "accumulating", "unsharded"],
)
def test_hooks_of_parameters_act_under_fsdp_as_under_ddp(on_ranks, strategy: Any, options: Any) -> None:
    for found, expected in zip(
        on_ranks(2, watch_parameters_on_rank, strategy, options),
        on_ranks(2, watch_parameters_on_rank, "paral_ddp", options),
        strict=True,
    ):
        assert found[0] == expected[0] == 9 * NUM_BATCHES
        assert len(found[1]) > found[0]
        torch.testing.assert_close(found[1:], expected[1:])


# Precision under FSDP


@pytest.mark.parametrize("precision", ["64-true", "16-true"])
def test_precision_of_weights_equals_one_process(on_ranks, precision: str) -> None:
    options = {"precision": precision, "gradient_clip_val": 0.05}
    tolerance = 1e-12 if precision == "64-true" else 2e-2
    fitted = on_ranks(2, fit_on_rank, Tied, 2, options | {"strategy": "paral_fsdp"})
    assert_same_weights(fitted, fit(Tied, NUM_BATCHES, 1, **options), tolerance)


def assert_same_weights(ranks: Any, expected: Any, tolerance: float) -> None:
    for _, weights in ranks:
        torch.testing.assert_close(weights, expected[1], rtol=0.0, atol=tolerance)


class BuiltLater(Tied):
    """Builds layers in `configure_model`, whose values are drawn unit by unit under FSDP."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def test_double_precision_in_configure_model_equals_one_process(on_ranks) -> None:
    options = {"precision": "64-true"}
    fitted = on_ranks(2, fit_on_rank, BuiltLater, 2, options | {"strategy": "paral_fsdp"})
    assert_same_weights(fitted, fit(BuiltLater, NUM_BATCHES, 1, **options), 1e-12)


# Tensors that no rank averages


class TrainedBuffer(Fitted):
    """Trains a codebook that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(LENGTH, WIDTH)
        self.register_buffer("codes", torch.full((WIDTH,), 0.5, requires_grad=True))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.hidden(batch[0].float() / VOCABULARY) * self.codes - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.codes], lr=0.1)


class TrainedOutside(TrainedBuffer):
    """Trains a module in a list, which is not a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_away = [nn.Linear(WIDTH, 1)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden_away[0].parameters()], lr=0.1)


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_trained_tensors_outside_parameters_are_refused(on_ranks, strategy: str) -> None:
    options = {"strategy": strategy, "devices": 2}
    for message in on_ranks(2, _refusal_on_rank, TrainedBuffer, options):
        assert "SGD trains the buffer codes" in message
    for message in on_ranks(2, _refusal_on_rank, TrainedOutside, options):
        assert "SGD trains a Parameter of shape [1, 16] that is not a parameter of TrainedOutside" in message


def test_trained_buffer_trains_under_dp_as_on_one_device() -> None:
    _, weights = fit(TrainedBuffer, NUM_BATCHES, 1, strategy="paral_dp", devices=2)
    torch.testing.assert_close(weights, fit(TrainedBuffer, NUM_BATCHES, 1)[1])


# More under DP


class GraphKeepingLoss(Metric):
    """A metric used as a loss, which keeps tensors with their graphs, as in forecasting libraries."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")

    def update(self, predicted: Tensor, target: Tensor) -> None:
        self.total = (predicted - target).abs().mean()

    def compute(self) -> Tensor:
        return self.total

    def forward(self, predicted: Tensor, target: Tensor) -> Tensor:
        self.reset()
        self._enable_grad = True
        self.update(predicted, target)
        self.parts = {"last": [self.total * 2]}
        return self.total


class Forecaster(Fitted):
    """Has a metric as loss, and a layer whose `__new__` takes arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = WithNew(LENGTH, LENGTH)
        self.recurrent = nn.GRU(LENGTH, LENGTH)
        self.metric = GraphKeepingLoss()

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].float() / VOCABULARY
        return self.metric(self.recurrent(self.hidden(inputs).unsqueeze(0))[0].squeeze(0), inputs)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", self.metric(self.hidden(batch[0].float()), batch[0].float()).detach())


def error_of_forecaster(strategy: str, devices: int) -> tuple[float, Tensor]:
    torch.manual_seed(5)
    model, trainer = Forecaster(), quiet_trainer(strategy=strategy, devices=devices, max_epochs=1)
    trainer.fit(model, token_loader(NUM_BATCHES, 1))
    (metrics,) = trainer.validate(model, token_loader(NUM_BATCHES, 1), verbose=False)
    return metrics["error"], model.hidden.weight.detach().clone()


def test_differentiable_metric_can_be_copied_after_the_fit() -> None:
    torch.testing.assert_close(error_of_forecaster("paral_dp", 2), error_of_forecaster("auto", 1))


# Batch normalization over all ranks


class Normalizes(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.norm(batch[0].float()).square().mean()


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_batchnorm_over_ranks_is_refused_where_torch_has_none(on_ranks, strategy: str) -> None:
    options = {"strategy": strategy, "devices": 2, "sync_batchnorm": True}
    for message in on_ranks(2, _refusal_on_rank, Normalizes, options):
        assert "sync_batchnorm=True" in message
        assert "CUDA" in message


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
