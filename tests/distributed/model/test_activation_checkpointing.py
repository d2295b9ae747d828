"""Activation checkpointing computes the same gradients under every strategy, and keeps less."""

from functools import cache
from typing import Any

import pytest

from lightning_paral import ActivationCheckpointing, ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from tests.models.blocks import Tied
from tests.models.tokens import fit
from tests.running import assert_same_fit

NUM_BATCHES = 4
ONLY_UNITS = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STRATEGIES: dict[str, Any] = {
    "ddp": ParalDDPStrategy,
    "fsdp": ParalFSDPStrategy,
    "fsdp_one_unit": lambda **options: ParalFSDPStrategy(units=["Embedding"], **options),
    "zero1": lambda **options: ParalZeROStrategy(stage=1, **options),
    "zero2": lambda **options: ParalZeROStrategy(stage=2, **options),
    "zero3": lambda **options: ParalZeROStrategy(stage=3, deepspeed_config=ONLY_UNITS, **options),
}


class Deep(Tied):
    """Counts how often its blocks compute, and what the backward pass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0
        for block in self.blocks:
            block.down.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_forwards += 1


@cache
def fit_in_one_process() -> Any:
    return fit(Deep, NUM_BATCHES, 1, gradient_clip_val=0.5)


def fit_on_rank(label: str, offload_to_cpu: bool) -> Any:
    models = []

    def make() -> Deep:
        models.append(Deep())
        return models[0]

    options = ActivationCheckpointing(units=["Block"], offload_to_cpu=offload_to_cpu)
    strategy = STRATEGIES[label](activation_checkpointing=options)
    fitted = fit(make, NUM_BATCHES, 2, gradient_clip_val=0.5, strategy=strategy)
    assert "forward" not in vars(models[0].blocks[0])
    return fitted, models[0].num_forwards


@pytest.mark.parametrize("label", STRATEGIES)
def test_training_equals_one_process_and_blocks_compute_twice(on_ranks, label: str) -> None:
    ranks = on_ranks(2, fit_on_rank, label, label == "ddp")

    assert_same_fit([fitted for fitted, _ in ranks], fit_in_one_process())
    for _, num_forwards in ranks:
        assert num_forwards == 2 * 4 * NUM_BATCHES
