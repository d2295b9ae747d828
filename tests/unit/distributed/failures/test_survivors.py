"""Which ranks save together after a failure."""

import pytest

from lightning_paral.distributed.failures.survivors import Savers, StepPosition, choose_savers
from lightning_paral.distributed.mesh import ParallelDims

DDP = ParallelDims(replicate=4).shards
HYBRID = ParallelDims(replicate=2, shard=2).shards
SHARDED = ParallelDims(shard=4).shards


def at(step: int, *, is_complete: bool = True) -> StepPosition:
    return StepPosition(epoch=1, batch=step, step=step, is_complete=is_complete)


@pytest.mark.parametrize(
    ("positions", "shards", "ranks", "missing"),
    [
        pytest.param({rank: at(3) for rank in range(4)}, SHARDED, (0, 1, 2, 3), (), id="all live"),
        pytest.param({0: at(3), 2: at(3)}, DDP, (0, 2), (), id="replicas"),
        pytest.param({0: at(3), 3: at(3)}, HYBRID, (0, 3), (), id="both shards, of different replicas"),
        pytest.param({1: at(3), 3: at(3)}, HYBRID, (1, 3), (0, 2), id="one shard only"),
        pytest.param({0: at(3), 1: at(3), 2: at(3)}, SHARDED, (0, 1, 2), (3,), id="no replicas"),
        pytest.param({0: at(4), 1: at(3), 2: at(3)}, DDP, (0,), (), id="the latest step"),
        pytest.param({0: at(4), 2: at(3), 3: at(3)}, HYBRID, (2, 3), (), id="the latest step that is there"),
        pytest.param({0: at(3, is_complete=False), 1: at(3)}, DDP, (1,), (), id="inside a step"),
        pytest.param({0: at(3, is_complete=False)}, DDP, (), (0, 1, 2, 3), id="nothing complete"),
    ],
)
def test_ranks_at_one_step_with_all_shards_save(
    positions: dict[int, StepPosition], shards: list[int], ranks: tuple[int, ...], missing: tuple[int, ...]
) -> None:
    savers = choose_savers(positions, shards)

    assert (savers.ranks, savers.missing) == (ranks, missing)


def test_reason_names_ranks_and_steps_in_one_line() -> None:
    savers = choose_savers({0: at(4), 1: at(3, is_complete=False), 2: at(4)}, DDP)

    assert savers.reason == (
        "rank 3 of 4 ended or did not answer, ranks 0, 2: at step 4 (batch 4 of epoch 0), "
        "rank 1: inside the optimizer step after step 3 (batch 3 of epoch 0)"
    )
    assert choose_savers(dict.fromkeys(range(4), at(3)), DDP) == Savers(ranks=(0, 1, 2, 3))
