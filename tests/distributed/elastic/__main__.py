"""Kill ranks and nodes at random times: `python -m tests.distributed.elastic --kills 20`.

Two runs under torchrun, `split="global"`, fp64, a checkpoint every five steps:

- restarts: 4 ranks, of which a random one gets SIGKILL, as often as `--kills` says, with `--max-restarts`.
- nodes: two agents with 2 ranks each and `--nnodes 1:2`. One is killed with its ranks, and started again later, as
  often as `--nodes` says. The run shrinks to 2 ranks and grows to 4 again.

Each must take every step with the samples and the loss of an undisturbed run in one process, and end with its weights.
"""

import argparse
import random
import re
import tempfile
import time
from pathlib import Path

from tests.distributed.elastic.job import Job, assert_same_run, run_undisturbed


def restarts(folder: Path, strategy: str, kills: int, chance: random.Random) -> Job:
    """Kill a random rank of 4 at random times."""
    job = Job(folder, strategy, 30 * (kills + 2), 0.05)
    try:
        job.start_agent("--standalone", "--nproc-per-node", "4", "--max-restarts", str(kills))
        for number in range(kills):
            started = time.monotonic()
            job.wait_for_progress(4, seconds=180)
            time.sleep(chance.uniform(0.0, 1.0))
            rank = job.kill_one_rank(chance)
            print(f"kill {number + 1}: rank {rank}, {time.monotonic() - started:.1f} s after the last", flush=True)
        job.finish(seconds=600)
    finally:
        job.end()
    return job


def nodes(folder: Path, strategy: str, times: int, chance: random.Random) -> Job:
    """Shrink from two nodes to one, and grow again."""
    job = Job(folder, strategy, 5 * (40 + 80 * times), 0.05)
    try:
        job.start_node(max_restarts=3 * times)
        time.sleep(2.0)  # so that the second agent finds the store of the first
        second = job.start_node(max_restarts=3 * times)
        for number in range(times):
            job.wait_for_progress(4, seconds=180)
            time.sleep(chance.uniform(0.0, 1.0))
            job.kill_node(second)
            started = time.monotonic()
            job.wait_for_progress(2, seconds=180)
            print(f"node {number + 1}: 2 ranks went on after {time.monotonic() - started:.1f} s", flush=True)
            second = job.start_node(max_restarts=3 * times)
            started = time.monotonic()
            job.wait_for_progress(4, seconds=180)
            print(f"node {number + 1}: 4 ranks went on after {time.monotonic() - started:.1f} s", flush=True)
        job.finish(seconds=900)
    finally:
        job.end()
    return job


def report(name: str, job: Job, undisturbed: Path) -> None:
    """Compare a job with an undisturbed one, and print a line."""
    assert_same_run(job, run_undisturbed(undisturbed, job.num_steps))
    lines = job.lines()
    runs = list(dict.fromkeys(each["run"] for each in lines))
    sizes = [len({each["rank"] for each in lines if each["run"] == run}) for run in runs]
    repeated = sum(map(int, re.findall(r"at least (\d+) steps? (?:is|are) trained again", job.output())))
    print(
        f"{name}: {len(runs)} starts with {sizes} ranks, {job.num_steps} steps, at least {repeated} trained again, "
        "each sample once per epoch, losses and final weights equal the undisturbed run's",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a new folder for logs and checkpoints")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    chance = random.Random(options.seed)
    print(f"logs in {folder}", flush=True)
    if options.kills:
        job = restarts(folder / "restarts", options.strategy, options.kills, chance)
        report("restarts", job, folder / "undisturbed-1")
    if options.nodes:
        job = nodes(folder / "nodes", options.strategy, options.nodes, chance)
        report("nodes", job, folder / "undisturbed-2")


if __name__ == "__main__":
    main()
