"""What cannot be split, or would change the training, is an error before the first step."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_paral import ConfigurationError, ParalFSDPStrategy
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from tests.models.chain import fit_chain
from tests.models.split_layers import SplitLayers
from tests.unit.engines.tensor.logits import Same


class DependsOnTheRank(SplitLayers):
    """Computes something else on each tensor rank, which must have the same full activations."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1.0 + 0.1 * dist.get_rank())) if dist.is_initialized() else super().forward(x)


class WritesInStep(SplitLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.twice.weight.data = self.twice.weight.data * 0.5
            with torch.no_grad():
                self.alone.weight[0].zero_()
                self.twice.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class UsesWeightsDirectly(SplitLayers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(torch.tanh(self.first(x)), self.alone.weight)[:, :3]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = self.alone.weight.square().sum() + self.twice.weight.norm()
        return super().training_step(batch, batch_idx) + 0.01 * penalty


class ValidatesByRank(SplitLayers):
    """Only the logged loss of an evaluation depends on the rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self._loss((batch[0] * (1.0 + 0.1 * dist.get_rank()), batch[1])))


class ReturnsNaNOnRanks(SplitLayers):
    """Only on several ranks, an evaluation logs NaN."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        split = isinstance(self.twice(self.first(batch[0])), SplitTensor)
        self.log("loss", self._loss(batch) * (float("nan") if split else 1.0))


class ChangesThroughAView(SplitLayers):
    """An `autograd.Function` gets the graph of features before they are changed."""

    def _changed(self, x: Tensor) -> Tensor:
        x = self.twice(x)
        x.view(-1, 2, 4).mul_(3.0)
        return Same.apply(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.alone(self._changed(self.first(x))))


class IsSplitAlready(SplitLayers):
    def configure_model(self) -> None:
        if not hasattr(self, "own"):
            full = torch.ones(8, 8)
            self.own = nn.Linear(8, 8)
            self.own.weight = nn.Parameter(distribute_tensor(full, self.device_mesh["tensor_parallel"], [Shard(0)]))


class IsCompiled(SplitLayers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].compile(backend="eager")


def error_of(world_size: int, module: type[LightningModule], options: dict[str, Any]) -> str:
    with pytest.raises((ConfigurationError, RuntimeError)) as error:
        fit_chain(ParalFSDPStrategy(**options), world_size, module=module)
    return str(error.value)


ALL = {"twice": "colwise", "alone": "rowwise"}


@pytest.mark.parametrize(
    ("world_size", "module", "options", "words"),
    [
        (2, SplitLayers, {"tensor_parallel": 4}, "does not divide the 2 ranks"),
        (2, SplitLayers, {"tensor_parallel": 2, "replicate": 2}, "replicate=2 does not divide the 1 groups"),
        (2, SplitLayers, {"tensor_parallel": 2, "plan": {"blok.*": "colwise"}}, "names no"),
        (2, SplitLayers, {"tensor_parallel": 2, "plan": {"twice": "columns"}}, "colwise"),
        (2, SplitLayers, {"tensor_parallel": 2, "plan": {"first": "rowwise"}}, "do not divide its 5 input features"),
        (2, DependsOnTheRank, {"tensor_parallel": 2, "plan": ALL}, "Splitting the layers of DependsOnTheRank changes"),
        (2, ValidatesByRank, {"tensor_parallel": 2, "plan": ALL}, "changes its validation_step"),
        (2, ChangesThroughAView, {"tensor_parallel": 2, "plan": ALL}, "the gradient of first"),
        (2, ReturnsNaNOnRanks, {"tensor_parallel": 2, "plan": ALL}, "what it returns or logs differs by nan"),
        (2, IsSplitAlready, {"tensor_parallel": 2, "plan": {"own": "colwise"}}, "own"),
        (2, IsCompiled, {"tensor_parallel": 2}, "compiled modules, such as blocks.1"),
        (1, SplitLayers, {"sequence_parallel": True}, "but tensor_parallel=1"),
    ],
)
def test_is_refused(on_ranks, world_size: int, module: Any, options: dict[str, Any], words: str) -> None:
    for message in on_ranks(world_size, error_of, world_size, module, options):
        assert words in message


def trained(world_size: int, module: type[LightningModule]) -> dict[str, Tensor]:
    strategy = ParalFSDPStrategy(tensor_parallel=2, plan=ALL, split="global") if world_size > 1 else "auto"
    return fit_chain(strategy, world_size, module=module)[1].state_dict()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("module", [WritesInStep, UsesWeightsDirectly])
def test_steps_use_split_weights_as_in_one_process(on_ranks, world_size: int, module: type[LightningModule]) -> None:
    expected = trained(1, module)
    for found in on_ranks(world_size, trained, world_size, module):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def warnings_on_two_nodes() -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        warnings.simplefilter("always")
        fit_chain(ParalFSDPStrategy(tensor_parallel=2, plan=ALL), 1, module=SplitLayers, num_nodes=2, num_batches=2)
    return [str(each.message) for each in caught]


def test_tensor_ranks_on_different_nodes_are_a_warning(on_ranks) -> None:
    first, _ = on_ranks(2, warnings_on_two_nodes)

    assert any("tensor ranks are on different nodes" in message for message in first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": "node", "replicate": 2}, "one copy of the model on each node"),
        ({"plan": {"up": "colwise"}}, "tensor_parallel=1"),
        ({"tensor_parallel": 2, "offload": True}, "cannot be combined"),
    ],
)
def test_options_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ParalFSDPStrategy(**options)
