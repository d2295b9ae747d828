"""The GPU programs run on CPU at a small size, so that they work when there is a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu import all as one_rank
from tests.gpu import two_on_one
from tests.gpu.crew import Crew, Skipped, alone
from tests.gpu.report import as_row

HERE = "tests.gpu.test_programs"


def passed(program: Any, report: Path, only: str) -> dict[str, Any]:
    """Run checks of a program, assert that they pass, and return the rows of its report by name."""
    code = program.run(["--device", "cpu", "--budget", "1500", "--out", str(report.parent), "--only", only])
    found = {row["name"]: row for row in json.loads(report.read_text())["checks"]}
    assert {name: row["reason"] for name, row in found.items() if row["status"] != "passed"} == {}
    assert code == 0
    return found


def test_every_check_of_one_rank_passes(tmp_path: Path) -> None:
    only = (
        "fit:paral_dp,fit:paral_ddp,fit:paral_fsdp,fit:paral_zero2,sync:paral_ddp,sync:paral_fsdp,"
        "precision:paral_fsdp,clip:paral_fsdp_offload,clip:paral_zero1_offload,memory:paral_ddp,activation_offload,backend,async:paral_fsdp,"
        "resume:paral_ddp,manual_optimization,replicas:bf16-true"
    )

    found = passed(one_rank, tmp_path / "all.json", only)

    assert {"save:paral_zero3", "operators"} < set(found)
    assert found["fit:paral_fsdp"]["facts"]["weights, accumulate=3"] <= 1e-5
    assert set(found["resume:paral_ddp"]["facts"]) == {"paral_ddp", "paral_fsdp_offload", "paral_zero3"}
    counted = found["sync:paral_ddp"]["facts"]
    assert counted["calls per step"] == counted["by hand"]
    assert "| fit:paral_fsdp | passed |" in (tmp_path / "all.md").read_text()


def test_two_ranks_on_one_device(tmp_path: Path) -> None:
    only = (
        "cpu_path,reduce:ring,parity:paral_ddp_ring,parity:fsdp_hybrid,modules:paral_fsdp,model_parallel:pipeline,"
        "save:paral_zero2,resume:paral_fsdp,failing:ddp"
    )

    found = passed(two_on_one, tmp_path / "two_on_one.json", only)

    assert found["reduce:ring"]["facts"]["identical"] is True
    assert set(found["resume:paral_fsdp"]["facts"]) == {"paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3"}
    assert found["failing:ddp"]["facts"]["code of rank 1"] == 1


def test_steps_are_measured_beside_loops() -> None:
    command = "-m torch.distributed.run --nproc-per-node 1 -m tests.benchmarks.steps --rounds 1 --steps 2"
    names = ["paral_ddp", "paral_zero2"]
    done = subprocess.run([sys.executable, *command.split(), *names], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(paral_\w+|torch DDP|deepspeed 2) ", done.stdout, re.MULTILINE) == [
        *names, "torch DDP", "deepspeed 2"
    ]  # fmt: skip


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


def test_failing_crashing_or_hanging_check_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    crew = Crew(alone, tmp_path, "crew")
    found = {}
    try:
        for name in ("one", "fail", "crash", "refuse", "hang", "one"):
            answers = crew.call(f"{HERE}:one", budget=60)  # so that the calls below find a running process
            assert answers[0].status == "returned"
            found[name] = as_row(name, 0.0, crew.call(f"{HERE}:{name}", budget=1 if name == "hang" else 60))
    finally:
        crew.end()

    statuses = {name: row.status for name, row in found.items()}
    failed = dict.fromkeys(("fail", "crash", "hang"), "failed")
    assert statuses == {"one": "passed", "refuse": "skipped", **failed}
    assert "ValueError: on purpose" in found["fail"].reason
    assert "code -6" in found["crash"].reason
    assert "in hang" in found["hang"].reason  # its stack
