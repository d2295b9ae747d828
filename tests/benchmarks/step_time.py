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
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import lightning_paral  # noqa: F401  registers the names
from examples.gpt import GPT
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.layout import layouts_of
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.passes import StepEvents
from lightning_paral.planning.time.step_time import step_seconds
from tests.benchmarks.common import StepTimes, differences, print_table
from tests.network import run_on_nodes
from tests.running import quiet_trainer

LINKS = {"100 Mbit/s": ("100mbit", "32kb", 12.5e6), "500 Mbit/s": ("500mbit", "128kb", 62.5e6)}
"""For each link: the rate and the burst of `tc`, about 2 ms of the rate, and bytes per second."""
PAYLOAD = 1448 / 1514
"""The part of an Ethernet frame that carries data of TCP; the rate of `tc` counts whole frames."""
STRATEGIES = ("paral_ddp", "paral_fsdp", "paral_zero2")
WIDTH, LAYERS, BATCH_SIZE, CONTEXT = 256, 2, 16, 128
NUM_STEPS, NUM_ROUNDS = 4, 2


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=WIDTH, num_layers=LAYERS, context=CONTEXT)


def batches(count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (BATCH_SIZE * count, CONTEXT + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), BATCH_SIZE)


def measure_compute() -> tuple[float, float]:
    """Return the seconds of a step without communication, and of its optimizer. All ranks compute meanwhile."""
    model = make_model()
    optimizer = model.configure_optimizers()["optimizer"]
    optimizing, start = 0.0, 0.0
    for number, batch in enumerate(batches(NUM_STEPS + 1)):
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
    return taken / NUM_STEPS, optimizing / NUM_STEPS


def measure_strategy(name: str) -> list[float]:
    """Return the seconds from the end of each step to the end of the next."""
    times, num_ranks = StepTimes(), dist.get_world_size()
    trainer = quiet_trainer(strategy=name, devices=1, num_nodes=num_ranks, max_steps=NUM_STEPS + 2, callbacks=[times])
    trainer.fit(make_model(), batches(num_ranks * (NUM_STEPS + 2)))
    return differences(times.ends, 1)  # the first two steps warm up


def median_of(num: int, function: Callable[[], Any]) -> float:
    """Return the median seconds of a function that all ranks call at the same time."""
    taken = []
    for _ in range(num):
        dist.barrier()
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def run_worker() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    found: dict[str, list[float]] = {"compute": [], "optimizer": [], "latency": [], "copy": []}
    small, large = torch.zeros(1), torch.ones(2**20)
    for _ in range(NUM_ROUNDS):
        of_ring = median_of(30, lambda: dist.all_reduce(small))
        found["latency"].append(of_ring / (2 * (dist.get_world_size() - 1)))  # of one step of the ring
        found["copy"].append(large.nbytes / median_of(10, lambda: torch.empty_like(large).copy_(large)))
        for name in STRATEGIES:
            whole, part = measure_compute()
            found["compute"].append(whole)
            found["optimizer"].append(part)
            steps[name] += measure_strategy(name)
    medians: dict[str, Any] = {key: statistics.median(values) for key, values in found.items()}
    medians["steps"] = {name: statistics.median(taken) for name, taken in steps.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, medians)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


def run_world(num_hosts: int, link: str) -> list[dict[str, Any]]:
    rate, burst, _ = LINKS[link]
    command = [sys.executable, "-m", "tests.benchmarks.step_time", "--worker"]
    ended = run_on_nodes(num_hosts, command, rate, burst, timeout=900)
    (line,) = [line for line in ended[0].printed.splitlines() if line.startswith("[{")]
    return json.loads(line)


def rows_of(ranks: list[dict[str, Any]], link: str, followed: FollowedSteps) -> list[list[Any]]:
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
    for layout in layouts_of(STRATEGIES):
        events = StepEvents(followed.plain)
        predicted = step_seconds(layout, events, states, len(ranks), StepSettings(), machine, on_cpu=True)
        measured = statistics.mean(rank["steps"][layout.strategy] for rank in ranks)
        assert predicted is not None
        seconds = [1e3 * each for each in (mean("compute"), predicted, measured)]
        rows.append([len(ranks), link, layout.strategy, *seconds, predicted / measured])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().worker:
        run_worker()
        return
    followed = follow_steps(make_model, next(iter(batches(1))), StepSettings())
    rows = []
    for num_hosts in (2, 4):
        for link in LINKS:
            rows += rows_of(run_world(num_hosts, link), link, followed)
            print(rows[-len(STRATEGIES) :], file=sys.stderr, flush=True)
    print(
        f"GPT, {followed.states.num_params:,} parameters, batches of {BATCH_SIZE} x {CONTEXT} per rank, fp32, gloo, "
        f"{os.cpu_count()} cores"
    )
    headers = ("hosts", "link", "strategy", "compute ms", "predicted ms", "measured ms", "ratio")
    print_table(headers, rows, ("", "", "", ".0f", ".0f", ".0f", ".2f"))
    print(f"largest deviation {max(abs(row[-1] - 1) for row in rows):.0%}")


if __name__ == "__main__":
    main()
