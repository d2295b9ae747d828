"""The GPU programs run on CPU at a small size, so that they work when there is a GPU."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks import gpu
from tests.gpu import all as one_rank
from tests.gpu import staged, two_on_one
from tests.gpu.crew import Crew, Skipped, alone, leave
from tests.gpu.report import as_row

HERE = "tests.gpu.test_programs"


def rows(path: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(path.read_text())["checks"]}


def test_every_check_of_one_rank_passes(tmp_path: Path) -> None:
    only = (
        "versions,group:bound,fit:paral_dp,fit:paral_ddp,fit:paral_fsdp,fit:paral_zero2,sync:paral_ddp,sync:paral_fsdp,"
        "precision:paral_fsdp,clip:paral_fsdp_offload,memory:paral_ddp,activation_offload,backend,async:paral_fsdp,"
        "resume:paral_ddp"
    )

    code = one_rank.main(["--device", "cpu", "--budget", "1500", "--out", str(tmp_path), "--only", only])

    found = rows(tmp_path / "all.json")
    assert {name: row["reason"] for name, row in found.items() if row["status"] != "passed"} == {}
    assert code == 0
    assert set(only.split(",")) < set(found)
    assert found["fit:paral_fsdp"]["facts"]["weights, accumulate=3"] <= 1e-5
    assert set(found["resume:paral_ddp"]["facts"]) == {"paral_ddp", "paral_fsdp_offload", "paral_zero3"}
    counted = found["sync:paral_ddp"]["facts"]
    assert counted["calls per step"] == counted["by hand"]
    assert "| fit:paral_fsdp | passed |" in (tmp_path / "all.md").read_text()


def test_two_ranks_on_one_device(tmp_path: Path) -> None:
    only = (
        "cpu_path,reduce:ring,parity:paral_ddp_ring,parity:fsdp_hybrid,save:paral_zero2,resume:paral_fsdp,failing:ddp"
    )

    code = two_on_one.main(["--device", "cpu", "--budget", "1500", "--out", str(tmp_path), "--only", only])

    found = rows(tmp_path / "two_on_one.json")
    assert {name: row["reason"] for name, row in found.items() if row["status"] != "passed"} == {}
    assert code == 0
    assert found["reduce:ring"]["facts"]["identical"] is True
    assert set(found["resume:paral_fsdp"]["facts"]) == {"paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3"}
    assert found["failing:ddp"]["facts"]["code of rank 1"] == 1


def test_benchmarks_resume_where_they_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--device", "cpu", "--sizes", "tiny", "--out", str(tmp_path)]
    only = "torch,torch fully_shard,paral_ddp,paral_fsdp"

    assert gpu.main(["steps", "--only", only, "--budget", "-1", *common]) == 0
    assert "no time left" in capsys.readouterr().out
    assert gpu.main(["steps", "--only", only, *common]) == 0
    assert gpu.main(["largest", "--only", "torch", *common]) == 0
    assert gpu.main(["saves", "--only", "paral_fsdp", *common]) == 0
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    began = capsys.readouterr().out
    assert gpu.main(["table", *common]) == 0

    after = json.loads((tmp_path / "benchmarks.json").read_text())
    for measured in ("steps", "largest", "saves"):
        assert after[measured] == found[measured]
    assert {name: len(blocks) for name, blocks in found["steps"]["tiny"].items()} == dict.fromkeys(only.split(","), 2)
    assert [trial["layers"] for trial in found["largest"]["torch"] if trial["fits"]][-1] == 6
    assert len(found["saves"]["tiny"]["paral_fsdp"]["async"][0]["stalls"]) == 3
    assert "paral_fsdp" in began
    table = capsys.readouterr().out
    assert "tokens/s" in table
    assert "The largest GPT" in table


@pytest.mark.parametrize("largest", [0, 1, 23, 24, 25, 100, 777])
def test_bisection_finds_the_largest_that_fits(largest: int) -> None:
    tried: list[int] = []

    found = gpu.bisect(lambda number: tried.append(number) or number <= largest, 24)

    assert found is not None
    assert found <= largest <= found + max(1, 0.06 * largest)
    assert len(tried) == len(set(tried)) <= 40
    assert gpu.bisect(lambda number: None, 24) is None


def one() -> dict[str, Any]:
    return {"pid": os.getpid()}


def fail() -> None:
    raise ValueError("on purpose")


def crash() -> None:
    os.abort()


def hang() -> None:
    time.sleep(1000)


def refuse() -> None:
    raise Skipped("not here")


def go() -> None:
    leave({"left": True})


def test_failing_crashing_or_hanging_check_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    crew = Crew(alone, tmp_path, "crew")
    found = {}
    try:
        for name in ("one", "fail", "crash", "go", "refuse", "hang", "one"):
            answers = crew.call(f"{HERE}:one", budget=60)  # so that the calls below find a running process
            assert answers[0].status == "returned"
            found[name] = as_row(name, 0.0, crew.call(f"{HERE}:{name}", budget=1 if name == "hang" else 60))
    finally:
        crew.end()

    statuses = {name: row.status for name, row in found.items()}
    failed = dict.fromkeys(("fail", "crash", "hang"), "failed")
    assert statuses == {"one": "passed", "refuse": "skipped", "go": "passed", **failed}
    assert "ValueError: on purpose" in found["fail"].reason
    assert "code -6" in found["crash"].reason
    assert "in hang" in found["hang"].reason  # its stack
    assert found["go"].facts == {"left": True}


def collectives(rank: int, world_size: int) -> None:
    """Assert that each collective of a staged group returns the result of gloo."""
    staged.register()
    group, plain = dist.new_group(backend=staged.NAME), dist.new_group()
    assert type(group) is staged.StagedGroup
    mine = torch.arange(4.0) + 10 * rank
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        ours, expected = mine.clone(), mine.clone()
        dist.all_reduce(ours, op=operation, group=group)
        dist.all_reduce(expected, op=operation, group=plain)
        assert torch.equal(ours, expected)
    averaged = mine.bfloat16()
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG, group=group)
    assert torch.equal(averaged, torch.tensor([5.0, 6.0, 7.0, 8.0]).bfloat16())
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, mine.clone(), op=dist.ReduceOp.AVG, group=group)
    assert part.tolist() == [[5.0, 6.0], [7.0, 8.0]][rank]
    dist.reduce_scatter(part, list(mine.clone().split(2)), group=group)
    assert part.tolist() == [[10.0, 12.0], [14.0, 16.0]][rank]
    gathered = torch.empty(2, 4)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    assert gathered.tolist() == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    uneven = torch.empty(2 if rank == 0 else 6)
    sent, received = ([1, 3], [1, 1]) if rank == 0 else ([1, 3], [3, 3])
    dist.all_to_all_single(uneven, mine.clone(), received, sent, group=group)
    assert uneven.tolist() == [[0.0, 10.0], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]][rank]
    swapped = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(swapped, list(mine.split(2)), group=group)
    assert torch.cat(swapped).tolist() == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]][rank]
    collected = [torch.empty(4), torch.empty(4)] if rank == 1 else None
    dist.gather(mine, collected, dst=1, group=group)
    assert collected is None or torch.equal(torch.stack(collected), gathered)
    dist.scatter(part, list(mine.split(2)) if rank == 1 else None, src=1, group=group)
    assert part.tolist() == [[10.0, 11.0], [12.0, 13.0]][rank]
    dist.broadcast(part, src=1, group=group)
    assert part.tolist() == [12.0, 13.0]
    total = mine.clone()
    dist.reduce(total, dst=0, group=group)
    assert total.tolist() == ([10.0, 12.0, 14.0, 16.0] if rank == 0 else mine.tolist())
    around = torch.empty(1_000_000)
    passing = torch.full((1_000_000,), float(rank))
    works = [dist.isend(passing, 1 - rank, group=group), dist.irecv(around, 1 - rank, group=group)]
    for work in works:
        work.wait()
    assert torch.equal(around, torch.full((1_000_000,), float(1 - rank)))
    asynchronous = mine.clone()
    work = dist.all_reduce(asynchronous, group=group, async_op=True)
    assert torch.equal(work.get_future().wait()[0], torch.tensor([10.0, 12.0, 14.0, 16.0]))
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    dist.destroy_process_group(plain)


def run_collectives() -> None:
    collectives(dist.get_rank(), dist.get_world_size())


def test_staged_backend_equals_gloo(on_ranks) -> None:
    on_ranks(2, run_collectives)
