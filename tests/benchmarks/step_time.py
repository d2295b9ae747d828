"""The step time that `paral plan` predicts, beside the measured one, of hosts that are joined by slow links.

    python -m tests.benchmarks.step_time   # needs root, for network namespaces

Each host is a network namespace with one rank; its link has a nominal bandwidth. The model is given that bandwidth less
the headers of TCP, and what a user can measure beforehand without the strategies: the time of a step without
communication while all ranks compute, that of the optimizer and of a copy, and that of a small all-reduce, which gives
the latency. Nothing is fitted to the steps. Both kinds of step alternate in the same processes; printed are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from tabulate import tabulate
from torch.utils.data import DataLoader

import lightning_paral  # noqa: F401  registers the names
from examples.gpt import GPT
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.layout import layouts_of
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.passes import StepEvents
from lightning_paral.planning.time.step_time import step_seconds
from tests.network import joined_nodes
from tests.running import quiet_trainer

ROOT = Path(__file__).parents[2]
LINKS = {"100 Mbit/s": ("100mbit", "32kb", 12.5e6), "500 Mbit/s": ("500mbit", "128kb", 62.5e6)}
"""For each link: the rate and the burst of `tc`, about 2 ms of the rate, and bytes per second."""
PAYLOAD = 1448 / 1514
"""The part of an Ethernet frame that carries data of TCP; the rate of `tc` counts whole frames."""
STRATEGIES = ("paral_ddp", "paral_fsdp", "paral_zero2")
WIDTH, LAYERS, BATCH_SIZE, CONTEXT = 256, 2, 16, 128
NUM_STEPS = 4


class StepEnds(Callback):
    """Records when each training step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.ends.append(time.perf_counter())


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=WIDTH, num_layers=LAYERS, context=CONTEXT)


def windows(count: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (count, CONTEXT + 1), generator=generator)
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def measure_compute(num_steps: int) -> tuple[float, float]:
    """Return the seconds of a step without communication, and of its optimizer. All ranks compute meanwhile."""
    model = make_model()
    optimizer = model.configure_optimizers()["optimizer"]
    loader = DataLoader(windows(BATCH_SIZE * (num_steps + 1)), batch_size=BATCH_SIZE)
    optimizing, start = 0.0, 0.0
    for number, batch in enumerate(loader):
        if number == 1:  # the first step warms up
            dist.barrier()
            optimizing, start = 0.0, time.perf_counter()
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        began = time.perf_counter()
        optimizer.step()
        optimizing += time.perf_counter() - began
    taken = time.perf_counter() - start
    dist.barrier()
    return taken / num_steps, optimizing / num_steps


def measure_strategy(name: str, num_steps: int) -> list[float]:
    """Return the seconds from the end of each step to the end of the next."""
    ends = StepEnds()
    trainer = quiet_trainer(
        strategy=name, devices=1, num_nodes=dist.get_world_size(), max_steps=num_steps + 2, callbacks=[ends]
    )
    trainer.fit(
        make_model(), DataLoader(windows(BATCH_SIZE * dist.get_world_size() * (num_steps + 2)), batch_size=BATCH_SIZE)
    )
    return [end - start for start, end in pairwise(ends.ends[1:])]  # the first two steps warm up


def measure_latency() -> float:
    """Return the seconds of one step of a ring."""
    tensor = torch.zeros(1)
    taken = []
    for _ in range(30):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / (2 * (dist.get_world_size() - 1))


def measure_copy() -> float:
    """Return the bytes per second that a rank copies into new memory, while all ranks do."""
    source = torch.ones(2**20)
    taken = []
    for _ in range(10):
        dist.barrier()
        start = time.perf_counter()
        torch.empty_like(source).copy_(source)
        taken.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(taken)


def run_worker(rounds: int, strategies: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps: dict[str, list[float]] = {name: [] for name in strategies}
    compute, optimizer, latency, copy = [], [], [], []
    for _ in range(rounds):
        latency.append(measure_latency())
        copy.append(measure_copy())
        for name in strategies:
            whole, part = measure_compute(NUM_STEPS)
            compute.append(whole)
            optimizer.append(part)
            steps[name] += measure_strategy(name, NUM_STEPS)
    found = {
        "compute": statistics.median(compute),
        "optimizer": statistics.median(optimizer),
        "latency": statistics.median(latency),
        "copy": statistics.median(copy),
        "steps": {name: statistics.median(taken) for name, taken in steps.items()},
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


def run_world(num_hosts: int, link: str, rounds: int, strategies: list[str]) -> list[dict[str, Any]]:
    rate, burst, _ = LINKS[link]
    with joined_nodes(num_hosts, rate, burst) as nodes:
        command = [sys.executable, "-m", "tests.benchmarks.step_time", "--worker", "--rounds", str(rounds)]
        command += ["--strategies", *strategies]
        processes = [
            subprocess.Popen(
                nodes.command_on(host, command),
                cwd=ROOT,
                env=os.environ
                | {"RANK": str(host), "NODE_RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_hosts)}
                | {"MASTER_ADDR": nodes.addresses[0], "MASTER_PORT": "29545", "GLOO_SOCKET_IFNAME": "eth0"}
                | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host in range(num_hosts)
        ]
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("[{")]
    return json.loads(line)


def follow() -> FollowedSteps:
    batch = next(iter(DataLoader(windows(BATCH_SIZE), batch_size=BATCH_SIZE)))
    return follow_steps(make_model, batch, StepSettings())


def rows_of(ranks: list[dict[str, Any]], link: str, followed: FollowedSteps, strategies: list[str]) -> list[list[Any]]:
    def mean(key: str) -> float:
        return statistics.mean(rank[key] for rank in ranks)

    states = followed.states
    machine = Machine(
        flops=followed.plain.flops / (mean("compute") - mean("optimizer")),
        link=LINKS[link][2] * PAYLOAD,
        latency=mean("latency"),
        optimizer_bandwidth=(states.parameter_bytes + states.gradient_bytes + states.optimizer_bytes)
        / mean("optimizer"),
        copy_bandwidth=mean("copy"),
    )
    rows = []
    for layout in layouts_of(strategies):
        events = StepEvents(followed.plain)
        predicted = step_seconds(layout, events, states, len(ranks), StepSettings(), machine, on_cpu=True)
        measured = statistics.mean(rank["steps"][layout.strategy] for rank in ranks)
        assert predicted is not None
        row = [len(ranks), link, layout.strategy, mean("compute") * 1e3, predicted * 1e3, measured * 1e3]
        rows.append([*row, predicted / measured])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.rounds, arguments.strategies)
        return
    followed = follow()
    rows = []
    for num_hosts in arguments.hosts:
        for link in arguments.links:
            ranks = run_world(num_hosts, link, arguments.rounds, arguments.strategies)
            rows += rows_of(ranks, link, followed, arguments.strategies)
            print(rows[-len(arguments.strategies) :], ranks, file=sys.stderr, flush=True)
    print(
        f"GPT, {followed.states.num_params:,} parameters, batches of {BATCH_SIZE} x {CONTEXT} per rank, fp32, gloo, "
        f"{os.cpu_count()} cores"
    )
    headers = ["hosts", "link", "strategy", "compute ms", "predicted ms", "measured ms", "ratio"]
    print(tabulate(rows, headers, floatfmt=("", "", "", ".0f", ".0f", ".0f", ".2f")))
    print(f"largest deviation {max(abs(row[-1] - 1) for row in rows):.0%}")


if __name__ == "__main__":
    main()
