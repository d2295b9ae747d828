"""Checkpoints of split layers are those of every other strategy, with any number of tensor ranks."""

from functools import partial

import pytest

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.distributed.resuming import Layout, Resuming, parameters
from tests.models.split_layers import PLAN, SplitLayers

FOUR_WAYS = {name: style for name, style in PLAN.items() if name != "out"}
LAYOUTS: dict[str, Layout] = {
    "one process": (1, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_ddp": (2, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_fsdp": (4, partial(ParalFSDPStrategy, units=["Block"])),
    "paral_zero3": (2, partial(ParalZeROStrategy, stage=3)),
    "2 stages": (2, ParalPipelineStrategy),
    "2 tensor ranks": (2, partial(ParalFSDPStrategy, tensor_parallel="node", plan=PLAN)),
    "2 tensor ranks, full": (2, partial(ParalFSDPStrategy, tensor_parallel=2, plan=PLAN, checkpoint="full")),
    "4 tensor ranks": (4, partial(ParalFSDPStrategy, tensor_parallel=4, plan=FOUR_WAYS)),
    "2 shards x 2 tensor ranks": (4, partial(ParalFSDPStrategy, tensor_parallel=2, plan=PLAN)),
    "2 stages x 2 tensor ranks": (4, partial(ParalPipelineStrategy, stages=2, tensor_parallel=2, plan=PLAN)),
    "2 replicas x 2 tensor ranks": (4, partial(ParalFSDPStrategy, tensor_parallel=2, replicate=2, plan=PLAN)),
}
SPLIT = [layout for layout in LAYOUTS if "tensor" in layout]
OTHERS = [layout for layout in LAYOUTS if layout not in SPLIT]
STAGES = "2 stages x 2 tensor ranks"
MIXED = ["2 tensor ranks", "2 shards x 2 tensor ranks", STAGES]
ZERO = "paral_zero3"


@pytest.fixture(scope="module")
def resuming(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Resuming]:
    """By whether all parameters are trained."""
    return {
        each: Resuming(SplitLayers, LAYOUTS, rank_pool, tmp_path_factory.mktemp("saved"), each)
        for each in (False, True)
    }


@pytest.mark.parametrize(
    ("target", "sources"),
    parameters(
        [
            ("2 tensor ranks", [layout for layout in LAYOUTS if layout not in (ZERO, "paral_ddp")]),
            ("2 shards x 2 tensor ranks", ["one process", "paral_fsdp", "2 stages", *SPLIT]),
            (STAGES, ["one process", "paral_fsdp", "2 stages", *SPLIT]),
            *((layout, ["one process", *MIXED]) for layout in SPLIT if layout not in MIXED),
            *((layout, MIXED) for layout in OTHERS if layout != ZERO),
            (ZERO, MIXED),
            ("2 shards x 2 tensor ranks", [ZERO]),
        ],
        full=("2 tensor ranks", ZERO),
    ),
)
def test_resumed_run_equals_the_uninterrupted_one(
    resuming: dict[bool, Resuming], target: str, sources: list[str]
) -> None:
    resuming[ZERO in (target, *sources)].assert_resumed_equals_uninterrupted(target, sources)


@pytest.mark.parametrize("layout", SPLIT)
def test_checkpoint_is_the_one_of_one_process(resuming: dict[bool, Resuming], layout: str) -> None:
    resuming[False].assert_contents_equal("one process", [layout])


def test_module_loads_from_checkpoint(resuming: dict[bool, Resuming]) -> None:
    module = SplitLayers.load_from_checkpoint(resuming[False].path("2 shards x 2 tensor ranks"))

    assert module.blocks[0].up.weight.shape == (16, 8)
