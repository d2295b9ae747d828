from typing import Any
from lightning_paral import ParalPipelineStrategy
from tests.models.chain import Result, assert_equal_to, result_of_fit, Chain
from tests.models.split_layers import PLAN, SplitLayers


def on_tensor_ranks(world_size: int, accumulate: int, options: dict[str, Any]) -> Result:
    strategy = ParalPipelineStrategy(split="global", stages=2, tensor_parallel=2, plan=PLAN, **options)
    return result_of_fit(strategy, world_size, module=SplitLayers, accumulate_grad_batches=accumulate)

def test_a(on_ranks):
    assert_equal_to(result_of_fit("auto", 1, module=SplitLayers, accumulate_grad_batches=1), on_ranks(4, on_tensor_ranks, 4, 1, {}))
