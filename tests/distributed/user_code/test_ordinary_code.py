"""Precision of weights under FSDP."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.models.blocks import Block, Tied
from tests.models.tokens import fit

NUM_BATCHES = 4


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
