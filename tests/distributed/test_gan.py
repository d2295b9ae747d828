"""Several optimizers, as GANs and actor-critics have them, train as in one process under every strategy."""

from typing import Any

import pytest

from lightning_paral import ParalZeROStrategy
from tests.several_models import KINDS, Fitted, fit
from tests.zero_models import assert_same_fit

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

NOTHING_KEPT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
ZERO = (
    "paral_zero1",
    "paral_zero2",
    "paral_zero3",
    "zero3, nothing kept",
    "paral_zero2_offload",
    "paral_zero3_offload",
)


def strategy_of(name: str) -> Any:
    return ParalZeROStrategy(stage=3, deepspeed_config=NOTHING_KEPT) if name == "zero3, nothing kept" else name


def fit_all(strategy: str) -> dict[str, Fitted]:
    return {kind: fit(kind, 2, strategy=strategy_of(strategy)) for kind in KINDS}


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Fitted]:
    return {kind: fit(kind, 1) for kind in KINDS}


@pytest.mark.parametrize("strategy", ZERO)
def test_equals_one_process(on_ranks, of_one_process, strategy: str) -> None:
    tolerance = 1e-4 if "offload" in strategy else 1e-5
    ranks = on_ranks(2, fit_all, strategy)
    for kind, expected in of_one_process.items():
        assert_same_fit([of_rank[kind] for of_rank in ranks], expected, tolerance)
