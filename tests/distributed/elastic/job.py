"""Start the training script under torchrun, watch it, kill parts of it, and compare what it did."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.agreement import RankGroup
from tests.processes import ROOT, free_port

LAUNCHERS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
LAUNCHERS |= {"TORCHELASTIC_RUN_ID"}


class Job:
    """A run of `trained.py`: its agents, and what its ranks have written to `folder`."""

    def __init__(self, folder: Path, strategy: str, num_steps: int, seconds_per_step: float) -> None:
        self.folder = folder
        arguments = map(str, (folder, strategy, num_steps, seconds_per_step))
        self.script = ["-m", "tests.distributed.elastic.trained", *arguments]
        self.num_steps = num_steps
        self.port = free_port()
        self.agents: list[subprocess.Popen[str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start_agent(self, *options: str, **environment: str) -> "subprocess.Popen[str]":
        """Start an agent in a process group of its own; its output goes to `agent-N.log`."""
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *options, *self.script]
        with open(self.folder / f"agent-{len(self.agents)}.log", "w") as log:
            agent = subprocess.Popen(
                command,
                cwd=ROOT,
                env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.agents.append(agent)
        return agent

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))

    def lines(self) -> list[dict[str, Any]]:
        """Return what the ranks have written, in order of time. A line that is being written is left out."""
        found = []
        for path in (self.folder / "seen").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line) | {"pid": int(path.stem)})
        return sorted(found, key=lambda each: each["time"])

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until `condition()` is true. Raise an `AssertionError` if it takes too long, or if all agents end."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} took longer than {seconds} s:\n{self.output()[-6000:]}"
            ended = all(agent.poll() is not None for agent in self.agents)
            assert not ended, f"the run ended before {what}:\n{self.output()[-6000:]}"
            time.sleep(0.05)

    def wait_for_progress(self, num_ranks: int, seconds: float) -> None:
        """Wait until a new run of `num_ranks` ranks has saved at least once."""
        known = {each["run"] for each in self.lines()}
        saved: list[float] = []

        def has_saved() -> bool:
            lines = [each for each in self.lines() if each["run"] not in known]
            if len({each["rank"] for each in lines if each["run"] == lines[-1]["run"]}) != num_ranks:
                return False
            times = [path.stat().st_mtime for path in (self.folder / "checkpoints").glob("*.ckpt")]
            saved[:] = [at for at in times if at > lines[0]["time"]]
            return bool(saved)

        self.wait_for(f"a save by {num_ranks} ranks", has_saved, seconds)

    def kill_one_rank(self, chance: random.Random) -> int:
        """Kill a random rank of the newest run with SIGKILL, and return its rank."""
        lines = self.lines()
        pids = {each["rank"]: each["pid"] for each in lines if each["run"] == lines[-1]["run"]}
        rank, pid = chance.choice(sorted(pids.items()))
        os.kill(pid, signal.SIGKILL)
        return rank

    def kill_node(self, agent: "subprocess.Popen[str]") -> None:
        """Kill an agent and its ranks with SIGKILL, as if their node had lost power."""
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(timeout=30)

    def finish(self, seconds: float) -> None:
        """Wait for the agents that were not killed, and assert that they succeeded."""
        deadline = time.monotonic() + seconds
        for agent in self.agents:
            code = agent.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code in (0, -signal.SIGKILL), self.output()[-6000:]

    def end(self) -> None:
        """Kill what is left."""
        for agent in self.agents:
            if agent.poll() is None:
                self.kill_node(agent)

    def timeline(self) -> dict[int, dict[str, Any]]:
        """Return, by step, the epoch, the samples and the mean loss of all ranks, in the last run to take it."""
        by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in self.lines():
            by_step[line["step"]].append(line)
        timeline = {}
        for step, lines in sorted(by_step.items()):
            last = [each for each in lines if each["run"] == lines[-1]["run"]]
            numbers = sorted(number for each in last for number in each["numbers"])
            loss = sum(each["loss"] * len(each["numbers"]) for each in last) / len(numbers)
            timeline[step] = {"epoch": last[0]["epoch"], "numbers": numbers, "loss": loss}
        return timeline

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the checkpoint of the last step."""
        checkpoint = load(self.folder / "checkpoints" / f"step={self.num_steps}.ckpt", RankGroup())
        return {name: materialize(value) for name, value in checkpoint["state_dict"].items()}


def run_undisturbed(folder: Path, num_steps: int) -> Job:
    """Run the script in one process with Lightning's own strategy, and return its job."""
    job = Job(folder, "auto", num_steps, 0.0)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, *job.script], cwd=ROOT, env=environment, check=True, timeout=300, capture_output=True
    )
    return job


def assert_same_run(job: Job, undisturbed: Job) -> None:
    """Assert that a job took each step with the same samples and loss as the undisturbed one, and ended equal."""
    found, expected = job.timeline(), undisturbed.timeline()
    assert found.keys() == expected.keys() == set(range(job.num_steps)), "steps are missing"
    for step, seen in expected.items():
        assert (found[step]["epoch"], found[step]["numbers"]) == (seen["epoch"], seen["numbers"]), f"step {step}"
        assert abs(found[step]["loss"] - seen["loss"]) <= 1e-9 * abs(seen["loss"]), f"the loss of step {step}"
    by_epoch: dict[int, list[int]] = defaultdict(list)
    for seen in found.values():
        by_epoch[seen["epoch"]] += seen["numbers"]
    for epoch in range(max(by_epoch)):
        assert sorted(by_epoch[epoch]) == list(range(48)), f"epoch {epoch} does not have each sample once"
    weights = undisturbed.weights()
    for name, value in job.weights().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-9)
