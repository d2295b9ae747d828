"""Seconds from `fit()`, or from the start of a hand-written loop, to the end of the first step.

    python -m tests.benchmarks.first_step                # Lightning's ddp, and strategies beside their loops
    python -m tests.benchmarks.first_step paral_zero2 --ranks 2

Each time is measured in new processes, which have imported the library of the loop, or this package. Strategies and
loops take turns; times are medians.
"""

import argparse
import os
import subprocess
import sys
import time
from statistics import median

import torch
import torch.distributed as dist

from tests.benchmarks.common import show, silence
from tests.benchmarks.loops import EXAMPLE, Clock, counterpart, join, make_loop, make_task
from tests.running import quiet_trainer

NAMES = ("ddp", "paral_ddp", "paral_fsdp", "paral_zero2")


def seconds_on_rank(name: str) -> float:
    """Return the seconds on this rank of torchrun. All ranks begin together."""
    task, device, world_size = (
        make_task(EXAMPLE, torch.device("cpu")),
        torch.device("cpu"),
        int(os.environ["WORLD_SIZE"]),
    )
    is_fit = name == "ddp" or name.startswith("paral_")
    clock = Clock(device)
    trainer = quiet_trainer(strategy=name, accelerator="cpu", devices=world_size, max_steps=1, limit_val_batches=0,
                            gradient_clip_val=task.clip, callbacks=[clock]) if is_fit else None  # fmt: skip
    _meet(world_size)
    start = time.perf_counter()
    if trainer is not None:
        trainer.fit(task.module, task.batches)
        return clock.ends[0] - start
    join(device)
    step, end = make_loop(name, task, device)
    step(next(iter(task.batches)))
    taken = time.perf_counter() - start
    end()
    dist.destroy_process_group()
    return taken


def _meet(world_size: int) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("ready", 1)
    while store.add("ready", 0) < world_size:
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="strategies")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    silence()
    if "RANK" in os.environ:
        taken = seconds_on_rank(options.names[0])
        if os.environ["RANK"] == "0":
            print(f"seconds {taken}", flush=True)
        return
    loops = {name: counterpart(name if name.startswith("paral_") else f"paral_{name}") for name in options.names}
    seconds: dict[str, list[float]] = {name: [] for name in (*options.names, *loops.values())}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
    for _ in range(options.rounds):
        for name, found in seconds.items():
            command = [*torchrun, "-m", "tests.benchmarks.first_step", name]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
            found.append(next(float(line.split()[1]) for line in printed.splitlines() if line.startswith("seconds ")))
    rows = []
    for name, found in seconds.items():
        ratio = median(found) / median(seconds[loops[name]]) if name in loops else None
        rows.append({"name": name, "seconds": median(found), "ratio": ratio})
    show(rows, options.json)


if __name__ == "__main__":
    main()
