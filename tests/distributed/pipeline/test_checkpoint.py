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


class AllTrained(Chain):
    """ZeRO refuses parameters that a backward pass gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.never.requires_grad_(False)


@pytest.fixture(scope="module")
def resuming(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Resuming:
    return Resuming(Chain, LAYOUTS, rank_pool, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def resuming_all_trained(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Resuming:
    return Resuming(AllTrained, LAYOUTS, rank_pool, tmp_path_factory.mktemp("saved_all_trained"))


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
        full=("2 stages", "paral_fsdp", SHARDED, ZERO),
    ),
)
def test_resumed_run_equals_the_uninterrupted_one(
    resuming: Resuming, resuming_all_trained: Resuming, target: str, sources: list[str]
) -> None:
    runs = resuming_all_trained if ZERO in (target, *sources) else resuming
    runs.assert_resumed_equals_uninterrupted(target, sources)


def test_checkpoint_is_the_one_of_one_process(resuming: Resuming) -> None:
    resuming.assert_contents_equal("one process", PIPELINES)


def test_module_loads_from_checkpoint(resuming: Resuming) -> None:
    module = Chain.load_from_checkpoint(resuming.path("2 stages"))

    assert sum(parameter.numel() for parameter in module.parameters()) > 0
