"""Kill ranks and nodes at random times: `python -m tests.distributed.elastic --kills 20`.

Two runs under torchrun, `split="global"`, fp64, a checkpoint every five steps:

- restarts: 4 ranks, of which a random one gets SIGKILL, as often as `--kills` says, with `--max-restarts`.
- nodes: two agents with 2 ranks each and `--nnodes 1:2`. One is killed with its ranks, and started again later, as
  often as `--nodes` says. The run shrinks to 2 ranks and grows to 4 again.

Each must take every step with the samples and the loss of an undisturbed run in one process, and end with its weights.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from tests.distributed.elastic.job import Job, assert_same_run, run_undisturbed

CHANCE = random.Random(0)


def restarts(job: Job, kills: int) -> None:
    """Kill a random rank of 4 at random times."""
    job.start_agent("--standalone", "--nproc-per-node", "4", "--max-restarts", str(kills))
    for _ in range(kills):
        wait(job, 4)
        time.sleep(CHANCE.uniform(0.0, 1.0))
        print(f"killed rank {job.kill_one_rank(CHANCE)}", flush=True)


def nodes(job: Job, times: int) -> None:
    """Shrink from two nodes to one, and grow again."""
    job.start_node(max_restarts=3 * times)
    time.sleep(2.0)  # so that the second agent finds the store of the first
    second = job.start_node(max_restarts=3 * times)
    for _ in range(times):
        wait(job, 4)
        time.sleep(CHANCE.uniform(0.0, 1.0))
        job.kill_node(second)
        wait(job, 2)
        second = job.start_node(max_restarts=3 * times)
        wait(job, 4)


def wait(job: Job, num_ranks: int) -> None:
    started = time.monotonic()
    job.wait_for_progress(num_ranks, seconds=180)
    print(f"{num_ranks} ranks went on after {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    print(f"logs in {folder}", flush=True)
    for disturb, times, num_steps in (
        (restarts, options.kills, 30 * (options.kills + 2)),
        (nodes, options.nodes, 200 + 400 * options.nodes),
    ):
        if not times:
            continue
        job = Job(folder / disturb.__name__, options.strategy, num_steps, 0.05)
        try:
            disturb(job, times)
            job.finish(seconds=900)
        finally:
            job.end()
        assert_same_run(job, run_undisturbed(folder / f"undisturbed-{disturb.__name__}", num_steps))
        num_runs = len({line["run"] for line in job.lines()})
        print(f"{disturb.__name__}: {num_runs} starts, {num_steps} steps, equal to the undisturbed run", flush=True)


if __name__ == "__main__":
    main()
