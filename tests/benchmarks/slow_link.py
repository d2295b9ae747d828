"""Loss and time of the example's GPT on 4 nodes over slow links, under DDP and local SGD, by period and dtype.

    python -m tests.benchmarks.slow_link --results slow.jsonl
    python -m tests.benchmarks.slow_link --results slow.jsonl --plot docs/assets/slow-link.svg

Each node is a network namespace with a link of the given rate, which needs root. All cases train on the same number of
tokens. A case that is in the results file does not run again, so the command may be interrupted and repeated. The
table shows all cases in the file; `--plot` draws the loss by period. `ratio` is the time of all steps divided by that
of `paral_ddp` at the same rate, and `step` the median time of the steps in which nothing is exchanged.
"""

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from examples.gpt import GPT, StandardLibraryData
from lightning_paral import ParalDDPStrategy, ParalLocalSGDStrategy
from lightning_paral.comm import count_traffic
from tests.benchmarks.common import print_table, silence
from tests.network import run_on_nodes

NODES = 4
OUTER: dict[str, dict[str, Any]] = {
    "paral_local_sgd": {},
    "paral_diloco": {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
}
Case = dict[str, Any]


class Times(Callback):
    """Records when each step ends, and counts what this rank sends from the first step to the last."""

    def on_train_start(self, *_: Any) -> None:
        self.counting = ExitStack()
        self.traffic = self.counting.enter_context(count_traffic())
        self.ends = [time.perf_counter()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self.counting.close()


def train(case: Case) -> Case:
    """Train as one rank, and return what the table shows."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    period, wire = case["period"], None if case["wire"] == "fp32" else case["wire"]
    if case["strategy"] == "paral_ddp":
        strategy: Any = ParalDDPStrategy(wire_dtype=wire)
    else:
        strategy = ParalLocalSGDStrategy(period=period, wire_dtype=wire, **OUTER[case["strategy"]])
    module = GPT(
        width=case["width"], num_layers=case["layers"], num_heads=4, context=case["context"], learning_rate=case["lr"]
    )
    data = StandardLibraryData(batch_size=case["batch"], context=case["context"])
    steps = case["tokens"] // (NODES * case["batch"] * case["context"])
    times = Times()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=NODES,
        strategy=strategy,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[times],
        limit_val_batches=case["val_batches"],
        val_check_interval=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    each = [after - before for before, after in zip(times.ends, times.ends[1:], strict=False)]
    alone = [seconds for number, seconds in enumerate(each, 1) if number > 1 and (not period or number % period)]
    return case | {
        "loss": float(trainer.callback_metrics["val_loss"]),
        "seconds": times.ends[-1] - times.ends[0],
        "step_seconds": median(alone or each),
        "sent_bytes_per_step": (times.traffic.socket_bytes or 0) / steps,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


def cases(options: argparse.Namespace) -> list[Case]:
    sizes = {name: getattr(options, name) for name in ("tokens", "width", "layers", "context", "batch", "lr")}
    sizes["val_batches"] = options.val_batches
    rates, periods = options.rates.split(","), [int(each) for each in options.periods.split(",")]
    found: list[Case] = []
    for rate, wire in product(rates, options.wire.split(",")):
        if wire != "int8":
            found.append({"rate": rate, "strategy": "paral_ddp", "period": 0, "wire": wire, **sizes})
        for strategy, period in product(OUTER, periods):
            found.append({"rate": rate, "strategy": strategy, "period": period, "wire": wire, **sizes})
    return found


def run(case: Case) -> Case:
    """Train on all nodes; return what the first one found."""
    command = [sys.executable, "-m", "tests.benchmarks.slow_link", "--case", json.dumps(case)]
    ended = run_on_nodes(NODES, command, case["rate"], timeout=7200)
    lines = [line for line in ended[0].printed.splitlines() if line.startswith('{"rate"')]
    if any(end.code for end in ended) or not lines:
        raise SystemExit("\n".join(end.printed for end in ended))
    found: Case = json.loads(lines[-1])
    return found


def show(found: list[Case]) -> None:
    baseline = {each["rate"]: each["seconds"] for each in found if each["strategy"] == "paral_ddp"} | {
        each["rate"]: each["seconds"] for each in found if (each["strategy"], each["wire"]) == ("paral_ddp", "fp32")
    }
    rows = []
    for each in found:
        ratio = each["seconds"] / baseline.get(each["rate"], float("nan"))
        measured = (
            each["loss"],
            each["seconds"],
            ratio,
            1000 * each["step_seconds"],
            each["sent_bytes_per_step"] / 1e6,
        )
        rows.append([each["rate"], each["strategy"], each["period"] or "", each["wire"], *measured])
    headers = ("rate", "strategy", "period", "wire", "val_loss", "seconds", "ratio", "step_ms", "sent_MB_per_step")
    print_table(headers, rows, ("g", "g", "g", "g", ".4f", ".1f", ".3f", ".1f", ".3f"))


def plot(found: list[Case], path: str) -> None:
    """Draw the loss of each strategy by period, in fp32 on the wire; DDP is a line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "slow_link"  # the same file each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3))
    rate = found[0]["rate"]
    for name in OUTER:
        points = sorted((each["period"], each["loss"]) for each in found if is_drawn(each, name, rate))
        axes.plot([period for period, _ in points], [loss for _, loss in points], marker="o", label=name)
    for each in found:
        if is_drawn(each, "paral_ddp", rate):
            axes.axhline(each["loss"], color="gray", linestyle="--", label="paral_ddp")
    axes.set(xlabel="period (optimizer steps)", ylabel="validation loss", xscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def is_drawn(case: Case, strategy: str, rate: str) -> bool:
    return (case["strategy"], case["rate"], case["wire"]) == (strategy, rate, "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("slow_link.jsonl"))
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--periods", default="10,50")
    parser.add_argument("--wire", default="fp32,bf16,int8")
    parser.add_argument("--tokens", type=int, default=102_400, help="of all nodes together")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="sequences per node and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--val-batches", type=int, default=50)
    parser.add_argument("--plot", help="an SVG to write from the results, after the cases have run")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        silence()
        found = train(json.loads(options.case))
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    done = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    wanted = cases(options)
    for case in wanted:
        if not any(case.items() <= each.items() for each in done):
            done.append(run(case))
            with options.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(f"{len(done)} of {len(wanted)}: {done[-1]}", file=sys.stderr, flush=True)
    found = [each for case in wanted for each in done if case.items() <= each.items()]
    show(found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
