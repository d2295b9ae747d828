"""Ranks that hold different tensors, as the stages of a pipeline do, save one checkpoint."""

from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.async_save import BackgroundSaver
from lightning_paral.checkpoint.integrity import verify
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.checkpoint.save_plan import plan_save
from lightning_paral.checkpoint.shards import FlatShard, flat
from lightning_paral.checkpoint.state.optimizer import load_state, param_names, state_of
from lightning_paral.checkpoint.state.weights import PACKAGE_STATE_KEY, replicated_storages
from lightning_paral.distributed.agreement import RankGroup, all_ranks
from lightning_paral.options import DEFAULT_TIMEOUT

FORMS = ("full", "sharded")
LAYERS = ("first", "second")


class Keeping(nn.Module):
    """Has extra state that is not only tensors."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note, "numbers": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]


class Whole(nn.Module):
    """Two layers that share an embedding. Each stage may have one of them."""

    def __init__(self, stages: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(7, 5)
        self.embedding.weight.data = torch.randn(7, 5, generator=generator)
        for stage, name in enumerate(LAYERS):
            layer = nn.Linear(5, 5 + stage)
            for parameter in layer.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
            if stage in stages:
                setattr(self, name, layer)
                setattr(self, f"{name}_norm", nn.BatchNorm1d(3 + stage))
                setattr(self, f"{name}_keeping", Keeping(name))
        self.double()  # sums in float64 are exact enough not to depend on the ranks


def optimizer_of(module: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    decay = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "lr": 0.5}])
    for step in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
    return optimizer


def checkpoint_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "epoch": 3,
        "global_step": 7,
        "state_dict": module.state_dict(keep_vars=False),
        "optimizer_states": [state_of(optimizer, param_names(optimizer, module))],
        "callbacks": {"Best": {"score": torch.tensor(0.5)}},
        "loops": {"a": [1, 2]},
        PACKAGE_STATE_KEY: {"frozen": [name for name, _ in module.named_children()]},
    }


def save_stage(path: str, form: Any, in_background: bool) -> None:
    ranks = all_ranks()
    stages = [rank * 2 // ranks.world_size for rank in range(ranks.world_size)]
    module = Whole((stages[ranks.rank],))
    checkpoint = checkpoint_of(module, optimizer_of(module))
    job = SaveJob.prepare(checkpoint, path, form, ranks, replicated_storages(module), "Test", stages=stages)
    if not in_background:
        job.write(ranks)
        return
    saver = BackgroundSaver(DEFAULT_TIMEOUT)
    ranks.run_on_all("Saving", lambda: job.stage(saver.staging))
    saver.start(job.write)
    for parameter in module.parameters():
        parameter.data.zero_()
    saver.close()


def assert_is_whole(path: str | Path) -> None:
    expected = Whole()
    optimizer = optimizer_of(expected)
    checkpoint = load(path, RankGroup())
    found = Whole()
    found.load_state_dict(checkpoint["state_dict"])
    for name, value in expected.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(found.state_dict()[name], value), name
    assert [found.first_keeping.note, found.second_keeping.note] == list(LAYERS)
    assert checkpoint["callbacks"]["Best"]["score"].item() == 0.5
    assert checkpoint[PACKAGE_STATE_KEY]["frozen"] == [name for name, _ in expected.named_children()]
    (state,) = checkpoint["optimizer_states"]
    loaded = optimizer_of(found, steps=0)
    load_state(loaded, param_names(loaded, found), state)
    assert [group["lr"] for group in loaded.param_groups] == [1e-3, 0.5]
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(loaded.state[mine][key], value)
    assert verify(path) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_background", [False, True])
def test_stages_save_one_full_checkpoint(on_ranks, tmp_path: Path, form: str, in_background: bool) -> None:
    on_ranks(2, save_stage, str(tmp_path / "x.ckpt"), form, in_background)

    assert_is_whole(tmp_path / "x.ckpt")


# Which rank writes which tensor


def written(stages: list[int] | None, names: dict[int, list[str]]) -> dict[str, int]:
    """Return the number of elements of each tensor that this rank writes. `names` has the tensors of each rank."""
    ranks = all_ranks()
    weights = OrderedDict((name, torch.full((8, 3), float(len(name)))) for name in names[ranks.rank])
    replicated = {value.untyped_storage().data_ptr() for value in weights.values()}
    items = plan_save({"state_dict": weights}, ranks, replicated, stages=stages)
    assert all(len(flat(item.shard.values())) == sum(chunk.numel for chunk in item.shard.chunks) for item in items)
    return {str(item.path[1]): sum(chunk.numel for chunk in item.shard.chunks) for item in items}


def test_replicas_are_divided_among_the_ranks_that_hold_them(on_ranks) -> None:
    names = {0: ["a", "tied"], 1: ["a", "tied"], 2: ["tied", "b"], 3: ["tied", "b"]}

    found = on_ranks(4, written, [0, 0, 1, 1], names)

    assert [list(of_rank) for of_rank in found] == [["a", "tied", "b"]] * 4
    assert [list(of_rank.values()) for of_rank in found] == [[12, 6, 0], [12, 6, 0], [0, 6, 12], [0, 6, 12]]


def test_a_tensor_that_one_rank_holds_is_written_by_it(on_ranks) -> None:
    assert on_ranks(2, written, [0, 1], {0: ["a"], 1: ["b"]}) == [{"a": 24, "b": 0}, {"a": 0, "b": 24}]


def test_stages_divide_the_writing_of_equal_tensors(on_ranks) -> None:
    assert on_ranks(2, written, [0, 1], {0: ["a"], 1: ["a"]}) == [{"a": 12}, {"a": 12}]


def save_shards(path: str, form: Any) -> None:
    """Two stages of two ranks each, with tensors in shards of each kind, one of which is in both stages."""
    ranks = all_ranks()
    stage, index = divmod(ranks.rank, 2)
    meshes = [DeviceMesh("cpu", members) for members in ([0, 1], [2, 3])]

    def shards(seed: int) -> list[Tensor]:
        full = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        local = full[3 * index : 3 * index + 3]
        values = full.flatten()[12 * index : 12 * index + 12]
        return [
            DTensor.from_local(local, meshes[stage], [Shard(0)], run_check=False),
            FlatShard(full.shape, full.dtype, 12 * index, 12, lambda: values, 2 - stage),
        ]

    own, shared = shards(stage), shards(9)
    weights = {f"rows{stage}": own[0], f"flat{stage}": own[1], "rows": shared[0], "flat": shared[1]}
    callback = {"values": {f"average{stage}": own[0]}}
    checkpoint = {"state_dict": weights, "callbacks": {"Average": callback}}
    SaveJob.prepare(checkpoint, path, form, ranks, set(), "Test", stages=[0, 0, 1, 1]).write(ranks)


@pytest.mark.parametrize("form", FORMS)
def test_shards_of_stages_are_written_once(on_ranks, tmp_path: Path, form: str) -> None:
    on_ranks(4, save_shards, str(tmp_path / "x.ckpt"), form)

    checkpoint = load(tmp_path / "x.ckpt", RankGroup())
    seeds = {"0": 0, "1": 1, "s": 9, "t": 9}
    assert len(checkpoint["state_dict"]) == 6
    for name, value in checkpoint["state_dict"].items():
        expected = torch.randn(6, 4, generator=torch.Generator().manual_seed(seeds[name[-1]]))
        assert torch.equal(value.clone(), expected), name
    for stage in (0, 1):
        expected = torch.randn(6, 4, generator=torch.Generator().manual_seed(stage))
        found = checkpoint["callbacks"]["Average"]["values"][f"average{stage}"]
        assert torch.equal(found.clone(), expected)
    assert verify(tmp_path / "x.ckpt") == []


def counting(counts: dict[str, int], name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    counts[name] += 1
    return call(*args, **kwargs)


def count_collectives(path: str, form: Any, stages: list[int] | None) -> dict[str, int]:
    """Return the number of collectives that preparing a save takes."""
    ranks = all_ranks()
    module = Whole() if stages is None else Whole((stages[ranks.rank],))
    counts = {"all_gather_object": 0, "broadcast_object_list": 0}
    with pytest.MonkeyPatch.context() as patched:
        for name in counts:
            patched.setattr(dist, name, partial(counting, counts, name, getattr(dist, name)))
        checkpoint = checkpoint_of(module, optimizer_of(module))
        SaveJob.prepare(checkpoint, path, form, ranks, replicated_storages(module), "Test", stages=stages)
    return counts


@pytest.mark.parametrize(("form", "num_gathers"), [("full", 2), ("sharded", 3)])
def test_ranks_with_equal_tensors_exchange_one_number_each(
    on_ranks, tmp_path: Path, form: str, num_gathers: int
) -> None:
    counts = on_ranks(2, count_collectives, str(tmp_path / "x.ckpt"), form, None)

    assert counts == [{"all_gather_object": num_gathers, "broadcast_object_list": 0}] * 2


# Mistakes


def refused(path: str, stages: list[int], mistake: str) -> str:
    ranks = all_ranks()
    weights = {f"w{stages[ranks.rank]}": torch.ones(3), "tied": torch.ones(4)}
    if mistake == "add" and ranks.rank == 1:
        weights["added"] = torch.ones(1)
    if mistake == "dtype" and stages[ranks.rank] == 1:
        weights["tied"] = torch.ones(4, dtype=torch.float64)
    if mistake == "alias" and stages[ranks.rank] == 1:
        weights["more"] = weights["tied"]
    if mistake == "alias" and stages[ranks.rank] == 0:
        weights["more"] = torch.ones(4)
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
