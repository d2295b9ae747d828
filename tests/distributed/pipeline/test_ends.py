"""`first_stage` and `last_stage`: modules outside of the chain that one stage holds, and uses that are refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ParalDDPStrategy, ParalPipelineStrategy
from lightning_paral.errors import ParalError
from tests.distributed.pipeline.test_shards import TWO_BY_TWO, assert_close, weights_of
from tests.models.chain import FEATURES, NUM_BLOCKS, WIDTH, Block, Regression, fit_chain, loader
from tests.running import quiet_trainer

ENDS: dict[str, Any] = {"first_stage": ["first"], "last_stage": ["head"]}


class First(nn.Module):
    """Embeds inputs; its own buffer notes calls, and dropout draws random numbers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.fill_(1.0)
        return self.dropout(self.norm(self.inner(x)))


class HasEnds(Regression):
    """A module with an embedding, a shared parameter, blocks and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = First(dropout)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1] > -9.0
        x = torch.tanh(self.first(x)) * mask
        for block in self.blocks:
            x = block(x, self.shift)
        return self.head(x + self.shift)


def fit_ends(make: Callable[[], HasEnds], options: dict[str, Any], world_size: int, runs: dict[str, Any]) -> Any:
    results = []
    for path, resume_from in runs.items():
        strategy = ParalPipelineStrategy(split="global", **options) if options else ParalDDPStrategy()
        losses, module, trainer = fit_chain(
            strategy, world_size, module=make, save_to=path, resume_from=resume_from, num_sanity_val_steps=0
        )
        trainer.validate(module, loader(2), verbose=False)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append((losses, weights_of(module), metrics, float(module.first.calls)))
    return results


@pytest.mark.parametrize(
    ("world_size", "make", "options"),
    [
        (2, HasEnds, {"micro_batches": 3}),
        (4, HasEnds, {"schedule": "gpipe"}),
        (2, HasEnds, {"schedule": "interleaved"}),
        (4, HasEnds, TWO_BY_TWO),
        (4, HasEnds, {"stages": 2}),
    ],
    ids=str,
)
def test_training_and_resuming_equal_one_process(
    on_ranks, tmp_path: Any, world_size: int, make: Any, options: dict[str, Any]
) -> None:
    one, of_stages = str(tmp_path / "one"), str(tmp_path / "stages")
    expected, resumed = fit_ends(make, {}, 1, {one: None, str(tmp_path / "resumed"): one})
    runs = {of_stages: None, str(tmp_path / "again"): of_stages, str(tmp_path / "from-one"): one}

    ranks = on_ranks(world_size, fit_ends, make, ENDS | options, world_size, runs)

    (from_stages,) = fit_ends(make, {}, 1, {str(tmp_path / "loaded"): of_stages})
    ranks.append([from_stages, from_stages, from_stages])
    for number, (losses, weights, metrics, _) in enumerate([expected, resumed, resumed]):
        of_data_ranks = [results[number][0] for results in ranks[:-1]]
        for batch, loss in losses.items():
            mean = sum(of_rank[batch] for of_rank in of_data_ranks) / world_size
            assert mean == pytest.approx(loss, rel=1e-5)
        for results in ranks[: world_size + (number > 0)]:
            assert_close(results[number][1], weights)
            assert results[number][2]["val_loss"] == pytest.approx(metrics["val_loss"], rel=1e-5)
    assert all(results[0][3] == 1.0 for results in ranks)  # the buffers are those of the first stage


def fit_dropout(dropout: float) -> list[float]:
    strategy = ParalPipelineStrategy(micro_batches=1, split="global", **ENDS)
    return list(fit_chain(strategy, 2, module=partial(HasEnds, dropout))[0].values())


def test_dropout_of_the_embedding_draws_the_masks_of_one_process(on_ranks) -> None:
    expected = list(fit_chain("auto", 1, module=partial(HasEnds, 0.3))[0].values())

    for losses in on_ranks(2, fit_dropout, 0.3):
        assert losses == pytest.approx(expected, rel=1e-5)


class Averages(First):
    """Keeps a running mean of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.mean.lerp_(x.detach().square().mean(), 0.5)
        return x


class HasMean(HasEnds):
    """Has a second name for its embedding, and notes the mean that this keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Averages()
        self.embedding = self.first

    def on_train_batch_end(self, *args: Any) -> None:
        assert not self.first.mean.isnan()


def states_after_fit() -> list[str]:
    strategy = ParalPipelineStrategy(micro_batches=1, split="global", **ENDS)
    _, module, trainer = fit_chain(strategy, 2, module=HasMean, num_batches=4)
    messages = []
    for parameter in (module.first.inner.weight, module.head[1].weight):
        with pytest.raises(ParalError) as error:
            trainer.strategy.full_optimizer_state(parameter, "exp_avg")
        messages.append(str(error.value))
    return messages


def test_buffers_of_an_end_are_never_nan_and_states_are_refused_after_the_fit(on_ranks) -> None:
    for messages in on_ranks(2, states_after_fit):
        assert all("Call full_optimizer_state during the fit" in each for each in messages)


class DropsOut(HasEnds):
    """Has dropout between units, or after the last."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3, self.training and self.between)
        return nn.functional.dropout(self.head(x), 0.3, self.training and not self.between)


def fit_dropout_outside(options: dict[str, Any], between: bool) -> list[float]:
    strategy = ParalPipelineStrategy(split="global", **options)
    return list(fit_chain(strategy, 2, module=partial(DropsOut, between), num_batches=2)[0].values())


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved"}], ids=str)
def test_the_check_of_the_loss_leaves_out_dropout_outside_of_units(on_ranks, options: Any, between: bool) -> None:
    assert all(len(losses) == 2 for losses in on_ranks(2, fit_dropout_outside, options, between))


class HasExpanded(HasEnds):
    """Has a buffer that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.zeros(1).expand(3))


def test_one_stage_leaves_buffers_as_they_are() -> None:
    fit_chain(ParalPipelineStrategy(stages=1), 1, module=HasExpanded, num_batches=2)


# What is refused


def through(module: Any, x: Tensor) -> Tensor:
    for block in module.blocks:
        x = block(x)
    return x


def adds_embedding(module: Any, x: Tensor) -> Tensor:
    embedded = module.first(x)
    return module.head(through(module, embedded) + embedded)


def gives_to_second(module: Any, x: Tensor) -> Tensor:
    hidden = embedded = module.first(x)
    for number, block in enumerate(module.blocks):
        hidden = block(hidden, embedded if number == 2 else None)
    return module.head(hidden)


def penalizes(module: Any, x: Tensor) -> Tensor:
    return HasEnds.forward(module, x) + 1e-3 * module.first.inner.weight.norm()


class CopiesHead(HasEnds):
    def on_train_start(self) -> None:
        copy.deepcopy(self.head if self.global_rank else self.first)  # the last stage is rank 0


class TiesEnds(HasEnds):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head[1].weight = self.out.weight


def refusal(use: Any, options: dict[str, Any]) -> str:
    """Fit a subclass of `HasEnds`, or one with `use` as its `forward`."""
    torch.manual_seed(3)
    make = use if isinstance(use, type) else type("Uses", (HasEnds,), {"forward": use})
    strategy = ParalPipelineStrategy(split="global", **options)
    with pytest.raises(ParalError) as error:
        quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(make(), loader(2), loader(1))
    return str(error.value)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        (adds_embedding, ENDS, "NaN on the first samples, and the code after the last unit is the first to return NaN"),
        (gives_to_second, ENDS, "NaN on the first samples, and blocks.2 is the first to return NaN"),
        (penalizes, ENDS, "first.inner.weight"),
        (CopiesHead, ENDS, "was copied, with a module"),
        (TiesEnds, ENDS, "last_stage names 'head', of which a parameter is also 'out.weight', outside of it"),
        (HasEnds, {"first_stage": ["embed"]}, "has no such submodule. Give dotted names"),
        (HasEnds, {"first_stage": ["blocks.0"]}, "'blocks.0', which overlaps with the unit 'blocks.0'"),
        (HasEnds, {"first_stage": ["first"], "last_stage": ["first.inner"]}, "overlaps with 'first' of first_stage"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_uses_of_ends_are_refused(in_own_world, use: Any, options: dict[str, Any], message: str) -> None:
    messages = in_own_world(2, refusal, use, options)

    assert any(message in each for each in messages), messages
