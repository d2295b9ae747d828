"""Ranks that hold different tensors, as the stages of a pipeline do, save one checkpoint or are refused."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup, all_ranks


def refused(path: str, stages: list[int], mistake: str) -> str:
    ranks = all_ranks()
    weights = {f"w{stages[ranks.rank]}": torch.ones(3), "tied": torch.ones(4)}
    if mistake == "add" and ranks.rank == 1:
        weights["added"] = torch.ones(1)
    if mistake == "dtype" and stages[ranks.rank] == 1:
        weights["tied"] = torch.ones(4, dtype=torch.float64)
    if mistake == "alias":
        weights["more"] = weights["tied"] if stages[ranks.rank] == 1 else torch.ones(4)
    replicated = {value.untyped_storage().data_ptr() for value in weights.values()}
    with pytest.raises(CheckpointError) as raised:
        SaveJob.prepare({"state_dict": weights}, path, "full", ranks, replicated, "Test", stages=stages)
    assert dist.get_world_size() == ranks.gather(1).count(1)  # all ranks raise, and none waits
    return str(raised.value)


@pytest.mark.parametrize(
    ("stages", "mistake", "ranks", "name"),
    [
        ([0, 0], "add", "0 and 1", "state_dict.added."),
        ([0, 0, 1, 1], "add", "0 and 1", "state_dict.added"),
        ([0, 0, 1, 1], "dtype", "0 and 2", "state_dict.tied"),
        ([0, 0, 1, 1], "alias", "0 and 2", ""),
    ],
)
def test_entry_on_some_ranks_of_a_stage_is_refused(
    on_ranks, tmp_path: Path, stages: list[int], mistake: str, ranks: str, name: str
) -> None:
    for message in on_ranks(len(stages), refused, str(tmp_path / "x.ckpt"), stages, mistake):
        assert f"Ranks {ranks} do not save the same tensors: {name}" in message


def drifted(path: str) -> list[str]:
    ranks = all_ranks()
    stages = [0, 1]
    weights = {f"w{ranks.rank}": torch.ones(3), "tied": torch.full((4,), float(ranks.rank))}
    replicated = {value.untyped_storage().data_ptr() for value in weights.values()}
    warning = pytest.warns(UserWarning, match="drifted apart: 1 tensors .* such as tied")
    with warning if ranks.is_rank_0 else nullcontext():
        job = SaveJob.prepare({"state_dict": weights}, path, "full", ranks, replicated, "Test", stages=stages)
    job.write(ranks)
    return list(weights)


def test_a_tensor_that_differs_between_stages_is_named_and_the_first_saved(on_ranks, tmp_path: Path) -> None:
    on_ranks(2, drifted, str(tmp_path / "x.ckpt"))

    assert load(tmp_path / "x.ckpt", RankGroup())["state_dict"]["tied"].tolist() == [0.0] * 4
