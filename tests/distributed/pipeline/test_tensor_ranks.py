"""Stages whose ranks compute each layer together train as one process."""

from functools import cache, partial
from typing import Any

import pytest
from torch import Tensor

from lightning_paral import ConfigurationError, ParalPipelineStrategy
from lightning_paral.planning.layout import Layout
from tests.distributed.pipeline.test_hugging_face import ENDS, LanguageModel, fit_language_model
from tests.distributed.tensor.test_refusals import DependsOnTheRank
from tests.models.chain import Result, assert_equal_to, fit_chain, result_of_fit
from tests.models.split_layers import PLAN, Block, SplitLayers

TwoByTwo = partial(ParalPipelineStrategy, stages=2, tensor_parallel=2)


class FourBlocks(SplitLayers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(0, Block())


@cache
def in_one_process(accumulate: int, module: Any = SplitLayers) -> Result:
    return result_of_fit("auto", 1, module=module, accumulate_grad_batches=accumulate)


def on_four_ranks(accumulate: int, options: dict[str, Any], module: Any = SplitLayers) -> Result:
    strategy = TwoByTwo(split="global", **{"plan": PLAN, **options})
    return result_of_fit(strategy, 4, module=module, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (1, {"schedule": "gpipe", "micro_batches": 3}),
        (3, {"first_stage": ["first"], "last_stage": ["twice", "alone", "out"]}),
        (1, {"plan": {"blocks.*.down": "colwise", "out": "rowwise"}}),  # units return tensors that are split
        (1, {"stages": 1, "checkpoint": "full"}),
        (3, {"stages": 1, "shard": True}),
    ],
    ids=str,
)
def test_tensor_ranks_in_stages_equal_one_process(on_ranks, accumulate: int, options: dict[str, Any]) -> None:
    assert_equal_to(in_one_process(accumulate), on_ranks(4, on_four_ranks, accumulate, options))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_interleaved_parts_of_tensor_ranks_equal_one_process(on_ranks, schedule: str) -> None:
    ranks = on_ranks(4, on_four_ranks, 3, {"schedule": schedule}, FourBlocks)
    assert_equal_to(in_one_process(3, FourBlocks), ranks)


class IgnoresTokens(LanguageModel):
    """Ignores other numbers of targets in each sample."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        labels = batch.masked_fill(batch < batch[:, :1] // 2, -100)
        loss: Tensor = self.model(input_ids=batch, labels=labels).loss
        return loss


@pytest.mark.parametrize("tied", [True, False])
def test_llama_equals_one_process(on_ranks, tied: bool) -> None:
    make = partial(IgnoresTokens, "llama", tied)
    first, last = ([], []) if tied else ENDS["llama"]
    losses, weights = fit_language_model(1, make, "auto")

    for found, found_weights in on_ranks(
        4, fit_language_model, 4, make, TwoByTwo(split="global", first_stage=first, last_stage=last)
    ):
        assert found == pytest.approx(losses, abs=1e-4)
        for name, weight in found_weights.items():
            assert (weight - weights[name]).abs().max() <= 1e-4, name


# Refusals


def error_of(module: Any, options: dict[str, Any]) -> str:
    with pytest.raises((ConfigurationError, RuntimeError)) as error:
        fit_chain(TwoByTwo(plan=PLAN, **options), 4, module=module)
    return str(error.value)


def test_a_split_that_changes_the_step_is_refused(on_ranks) -> None:
    for message in on_ranks(4, error_of, DependsOnTheRank, {}):
        assert "Splitting the layers of DependsOnTheRank changes its training_step" in message


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ({}, 6, "stages=2 does not divide the 3 groups of tensor_parallel=2 ranks"),
        ({"stages": None}, 3, "tensor_parallel=2 does not divide the 3 ranks"),
        ({"stages": 1, "shard": 4}, 4, "shard=4 does not divide the 2 rank"),
    ],
    ids=str,
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(options: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TwoByTwo(**options)._options.check_world_size(world_size)


def test_a_plan_without_tensor_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel=1"):
        ParalPipelineStrategy(plan={"out": "colwise"})


def test_plans_count_both_dimensions() -> None:
    layout = Layout(strategy="paral_pp_tp", engine="pipeline", stages=2, tensor=2)

    assert layout.objection(6, 4) == "stages=2 x tensor_parallel=2 does not divide the 6 ranks of the plan"
    assert layout.objection(8, 4) is None
    assert Layout(strategy="paral_pp_tp", engine="pipeline", tensor=2).num_stages(8) == 4
