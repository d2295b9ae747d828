"""Stages whose ranks hold shards train as one process."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ParalPipelineStrategy
from tests.distributed.pipeline.test_hugging_face import LanguageModel, fit_language_model
from tests.distributed.pipeline.test_ordinary_use import BuiltLate
from tests.models.chain import FEATURES, WIDTH, Chain, fit_chain
from tests.running import quiet_trainer

Sharded = partial(ParalPipelineStrategy, split="global")
TWO_BY_TWO = {"stages": 2, "shard": True}
"""Two stages, each sharded over two of four ranks."""


def weights_of(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).abs().max() <= 1e-5, name


# Training: 20 steps with clipping


def fitted(strategy: Any, world_size: int, accumulate: int, algorithm: str, make: Any = Chain) -> Any:
    epochs = 5 if accumulate == 1 else 10  # of four batches: the last window of an epoch has one
    losses, module, trainer = fit_chain(
        strategy,
        world_size,
        module=make,
        num_batches=4,
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        gradient_clip_algorithm=algorithm,
        gradient_clip_val=0.5 if algorithm == "norm" else 0.02,
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "calls"}
    return list(losses.values()), weights_of(module), metrics, trainer.global_step


@cache
def in_one_process(accumulate: int, algorithm: str, make: Any) -> Any:
    return fitted("auto", 1, accumulate, algorithm, make)


def fitted_with(options: dict[str, Any], runs: list[Any]) -> list[Any]:
    return [
        fitted(Sharded(schedule=schedule, **options), 4, accumulate, algorithm, make)
        for schedule, accumulate, algorithm, make in runs
    ]


class Ties(Chain):
    """Shares the weight of an embedding with the head; the embedding's gradient comes from both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, WIDTH)
        self.out = nn.Linear(WIDTH, 3, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.embedding((x[:, 0] > 0).long())[:, :3]


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (
            {**TWO_BY_TWO, "micro_batches": 3},
            [
                ("1f1b", 1, "norm", Chain),
                ("1f1b", 3, "value", Ties),
                ("gpipe", 1, "value", Ties),
                ("gpipe", 3, "norm", BuiltLate),
            ],
        ),
        ({"stages": 2, "shard": 2, "micro_batches": 1, "checkpoint": "full"}, [("1f1b", 1, "norm", Ties)]),
        # Hybrid: two replicas of the only stage, each with two shards.
        ({"stages": 1, "shard": 2}, [("1f1b", 3, "norm", Chain)]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sharded_stages_equal_one_process(on_ranks, options: dict[str, Any], runs: list[Any]) -> None:
    ranks = on_ranks(4, fitted_with, options, runs)

    for number, (_, accumulate, algorithm, make) in enumerate(runs):
        losses, weights, metrics, steps = in_one_process(accumulate, algorithm, make)
        assert steps == 20
        mean = torch.tensor([results[number][0] for results in ranks]).mean(dim=0)
        torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=0.0)
        for results in ranks:
            assert_close(results[number][1], weights)
            assert results[number][2] == pytest.approx(metrics, rel=1e-5)


def test_sharded_language_model_with_tied_embeddings_equals_one_process(on_ranks) -> None:
    make = partial(LanguageModel, "qwen3", True)
    _, weights = fit_language_model(1, make, "auto")

    for _, found in on_ranks(4, fit_language_model, 4, make, Sharded(**TWO_BY_TWO)):
        assert_close(found, weights)


# Batches of which ranks have different numbers of samples


def uneven(world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Chain()
    inputs = torch.randn(12 + 12 + 7, FEATURES, generator=torch.Generator().manual_seed(7))
    batches = DataLoader(TensorDataset(inputs, inputs[:, :3]), 12)
    strategy: Any = Sharded(**TWO_BY_TWO) if world_size > 1 else "auto"
    quiet_trainer(devices=world_size, strategy=strategy, max_epochs=2).fit(module, batches)
    return weights_of(module)


def test_ranks_of_a_stage_may_have_different_numbers_of_samples(on_ranks) -> None:
    expected = uneven(1)

    for weights in on_ranks(4, uneven, 4):
        assert_close(weights, expected)
