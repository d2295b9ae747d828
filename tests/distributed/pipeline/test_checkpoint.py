"""Checkpoints of a pipeline are those of every other strategy, at any number of stages."""

from functools import partial

import pytest

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.distributed.resuming import Layout, Resuming, parameters
from tests.models.chain import Chain

SHARDED, HYBRID = "2 stages x 2 shards", "2 replicas x 2 shards"
LAYOUTS: dict[str, Layout] = {
    "one process": (1, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_ddp": (2, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_fsdp": (2, partial(ParalFSDPStrategy, units=["Block"])),
    "paral_zero3": (2, partial(ParalZeROStrategy, stage=3)),
    "2 stages": (2, ParalPipelineStrategy),
    "4 stages": (4, ParalPipelineStrategy),
    "2 stages of 2 parts": (2, partial(ParalPipelineStrategy, schedule="interleaved")),
    "2 stages, full": (2, partial(ParalPipelineStrategy, checkpoint="full")),
    "2 stages x 2 replicas": (4, partial(ParalPipelineStrategy, stages=2)),
    SHARDED: (4, partial(ParalPipelineStrategy, stages=2, shard=True)),
    HYBRID: (4, partial(ParalPipelineStrategy, stages=1, shard=2)),
}
PIPELINES = [layout for layout in LAYOUTS if "stages" in layout]
OTHERS = [layout for layout in LAYOUTS if layout not in PIPELINES]
ZERO = "paral_zero3"
SEEN = [layout for layout in LAYOUTS if layout not in (ZERO, HYBRID)]


@pytest.fixture(scope="module")
def resuming(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Resuming]:
    """By whether all parameters are trained."""
    return {each: Resuming(Chain, LAYOUTS, rank_pool, tmp_path_factory.mktemp("saved"), each) for each in (False, True)}


@pytest.mark.parametrize(
    ("target", "sources"),
    parameters(
        [
            *((layout, SEEN) for layout in PIPELINES if layout != SHARDED),
            *((layout, PIPELINES) for layout in OTHERS if layout in SEEN),
            (SHARDED, ["one process", "paral_fsdp", "4 stages", "2 stages x 2 replicas", SHARDED, HYBRID]),
            (HYBRID, [SHARDED]),
            (ZERO, PIPELINES),
            ("2 stages", [ZERO]),
            (SHARDED, [ZERO]),
        ],
        full=("2 stages", ZERO),
    ),
)
def test_resumed_run_equals_the_uninterrupted_one(
    resuming: dict[bool, Resuming], target: str, sources: list[str]
) -> None:
    resuming[ZERO in (target, *sources)].assert_resumed_equals_uninterrupted(target, sources)


@pytest.mark.parametrize("layout", PIPELINES)
def test_checkpoint_is_the_one_of_one_process(resuming: dict[bool, Resuming], layout: str) -> None:
    resuming[False].assert_contents_equal("one process", [layout])


def test_module_loads_from_checkpoint(resuming: dict[bool, Resuming]) -> None:
    module = Chain.load_from_checkpoint(resuming[False].path("2 stages"))

    assert sum(parameter.numel() for parameter in module.parameters()) > 0
