"""Ranks arranged along several dimensions have the right data rank and replicas."""

import itertools

import pytest

from lightning_paral.distributed.mesh import ParallelDims

SHAPES = list(itertools.product((1, 2, 3), repeat=4))


def every_rank(shape: tuple[int, ...]) -> list[ParallelDims]:
    pipeline, replicate, shard, tensor = shape
    num_ranks = pipeline * replicate * shard * tensor
    sizes = {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}
    return [ParallelDims(rank=rank, **sizes) for rank in range(num_ranks)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_batch_is_drawn_once_in_each_group_of_data_ranks(shape: tuple[int, ...]) -> None:
    ranks = every_rank(shape)

    for dims in ranks:
        assert dims.rank in dims.data_ranks
        assert [ranks[rank].data_rank for rank in dims.data_ranks] == list(range(dims.data_size))
        assert all(ranks[rank].data_ranks == dims.data_ranks for rank in dims.data_ranks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stages_are_consecutive_ranks(shape: tuple[int, ...]) -> None:
    ranks = every_rank(shape)

    stages = {tuple(dims.stage_ranks): dims.stage for dims in ranks}

    assert sorted(rank for stage in stages for rank in stage) == list(range(len(ranks)))
    assert sorted(stages.values()) == list(range(shape[0]))
    assert all(dims.rank in dims.stage_ranks for dims in ranks)
    assert all(dims.stages == [each.stage for each in ranks] for dims in ranks)


def test_tensor_ranks_are_neighbors_and_draw_the_same_batches() -> None:
    dims = [ParallelDims(rank=rank, replicate=2, shard=2, tensor=2, pipeline=2) for rank in range(16)]

    assert [each.data_rank for each in dims] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [each.stage for each in dims] == [1] * 8 + [0] * 8
    assert dims[5].data_ranks == [1, 3, 5, 7]


@pytest.mark.parametrize("given", [{"rank": 2, "shard": 2}, {"rank": -1}, {"tensor": 0}])
def test_ranks_outside_the_shape_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Sizes must be positive"):
        ParallelDims(**given)
