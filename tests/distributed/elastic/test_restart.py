"""A rank under torchrun is killed; the restarted run ends like an undisturbed one."""

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.launching import TORCHRUN, Process

NUM_STEPS = 60
SECONDS = 180


def seen_by_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks have written, in order of time, without a last line that is not yet complete."""
    found = []
    for path in (folder / "seen").glob("*.jsonl"):
        complete = path.read_text().rpartition("\n")[0].splitlines()
        found += [json.loads(line) | {"pid": int(path.stem)} for line in complete]
    return sorted(found, key=lambda each: each["time"])


def timeline(folder: Path) -> dict[int, tuple[int, list[int], float]]:
    """Return, by step, the epoch, the samples and the mean loss of all ranks, in the last run to take it."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in seen_by_ranks(folder):
        by_step[line["step"]].append(line)
    found = {}
    for step, lines in sorted(by_step.items()):
        last = [each for each in lines if each["run"] == lines[-1]["run"]]
        numbers = sorted(number for each in last for number in each["numbers"])
        loss = sum(each["loss"] * len(each["numbers"]) for each in last) / len(numbers)
        found[step] = (last[0]["epoch"], numbers, loss)
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = load(folder / "checkpoints" / f"step={NUM_STEPS}.ckpt", RankGroup())
    return {name: materialize(value) for name, value in checkpoint["state_dict"].items()}


def kill_rank_1_after_a_save(folder: Path, agent: Process) -> None:
    deadline = time.monotonic() + SECONDS
    while not list((folder / "checkpoints").glob("*.ckpt")):
        assert agent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(next(each["pid"] for each in seen_by_ranks(folder) if each["rank"] == 1), signal.SIGKILL)


@pytest.mark.lane("full")
def test_restarted_run_ends_like_an_undisturbed_one(launch, tmp_path: Path) -> None:
    script = ("-m", "tests.distributed.elastic.trained")
    killed, undisturbed, log = tmp_path / "killed", tmp_path / "undisturbed", tmp_path / "log"
    with log.open("w") as output:
        alone = launch(*script, str(undisturbed), "auto", str(NUM_STEPS), "0", output=output)
        assert alone.wait(SECONDS) == 0, log.read_text()
        options = (*script, str(killed), "ddp", str(NUM_STEPS), "0.05")
        agent = launch("--max-restarts", "1", *options, by=TORCHRUN, output=output)
        kill_rank_1_after_a_save(killed, agent)
        assert agent.wait(SECONDS) == 0, log.read_text()

    found, expected = timeline(killed), timeline(undisturbed)
    assert found.keys() == expected.keys() == set(range(NUM_STEPS))
    for step, (epoch, numbers, loss) in expected.items():
        assert found[step][:2] == (epoch, numbers)
        assert abs(found[step][2] - loss) <= 1e-9 * abs(loss)
    torch.testing.assert_close(weights(killed), weights(undisturbed), rtol=1e-9, atol=1e-9)
    assert len({each["run"] for each in seen_by_ranks(killed)}) == 2
    assert "AutoResume: resuming from " in log.read_text()
