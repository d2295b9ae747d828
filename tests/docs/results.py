"""The parts of README.md, docs/correctness.md and docs/measurements.md that show stored results, and their plots."""

import re
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import BENCHMARKS, load
from tests.docs.bench_tables import MIB, TABLES, row_of, step_table
from tests.docs.charts import Panel, Plot
from tests.tables import markdown

README = Path(__file__).parents[2] / "README.md"
ONE_PROCESS = "one process"
STEPS = {f"paral_{name}": f"{name}_step" for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")}
"""The benchmark of a training step, by strategy."""
SHOWN_STEPS = (1, 2, 5, 10, 20)


def blocks_of_correctness() -> dict[str, str]:
    """Return the generated blocks of the page, by name."""
    record, losses, differences = load()["correctness"], [], []
    for name, row in record["rows"].items():
        shown = name if name == ONE_PROCESS else f"`{name}`"
        values = [*(row["training"][step - 1] for step in SHOWN_STEPS), row["validation"]]
        losses.append([shown, *(f"{value:.6f}" for value in values)])
        if name != ONE_PROCESS:
            found = [row[f"{kind}_difference"] for kind in ("training", "validation", "weight")]
            differences.append([shown, *(f"{value:.1e}" for value in found)])
    steps = [f"step {step}" for step in SHOWN_STEPS]
    return {
        "differences": markdown(("", "training loss", "validation loss", "weights"), differences),
        "losses": markdown(("", *steps, "validation"), losses),
        "measured": measured_with(record, ("python -m tests.benchmarks.correctness --write",)),
    }


def correctness_plot() -> Plot:
    """Return the plot of the largest differences."""
    rows = load()["correctness"]["rows"]
    found = {name: row["training_difference"] for name, row in rows.items() if name != ONE_PROCESS}
    panel = Panel(
        title="Training losses equal those of one process",
        rows=[(name, value, f"{value:.1e}" if value else "0") for name, value in found.items()],
        limits=(1e-9, 1e-2),
        reference=1.2e-7,
        reference_label="largest relative difference in 20 steps; dashed: precision of fp32",
        log=True,
    )
    return Plot(panels=[panel])


def blocks_of_measurements() -> dict[str, str]:
    """Return the generated blocks of the page, by the names of the benchmarks."""
    blocks = {}
    for name, lines in BENCHMARKS.items():
        record = load()[name]
        shown = f"```text\n{record['printed']}\n```" if "printed" in record else record.get("table", "").rstrip()
        if "json" in record:
            shown = TABLES.get(name, step_table)(record["json"])
        blocks[name] = f"{shown}\n\n{measured_with(record, lines)}"
    return blocks


def measured_with(record: dict[str, Any], lines: tuple[str, ...]) -> str:
    """Return the commands, the date and the versions of a result."""
    commands = "<br>\n".join(f"`{line}`" for line in lines)
    return f"{commands}<br>\n{record['date']}, {record['with']}"


def step_ratios() -> dict[str, float]:
    """Return the time of a step divided by that of the hand-written loop, by strategy."""
    return {name: load()[benchmark]["json"][0]["rows"][0]["ratio"] for name, benchmark in STEPS.items()}


def measured_plot() -> Plot:
    """Return the plot of times relative to hand-written code."""
    (saved,) = load()["checkpoint"]["json"][0]["rows"]
    gathering, waiting = saved["save"] / saved["full"], saved["stall"] / saved["save"]
    shared: dict[str, Any] = {"limits": (0.0, 1.25), "reference": 1.0}
    return Plot(
        panels=[
            Panel(
                title="A training step, by strategy",
                rows=[(name, ratio, f"{ratio:.2f}") for name, ratio in step_ratios().items()],
                reference_label="time relative to a hand-written loop; dashed: equal",
                **shared,
            ),
            Panel(
                title="A checkpoint of 2.4 GB under paral_fsdp",
                rows=[
                    ("save", gathering, f"{gathering:.2f} of gathering"),
                    ("async_save=True", waiting, f"{waiting:.2f} of the save above"),
                ],
                reference_label="time relative to what the row names; dashed: equal",
                **shared,
            ),
        ]
    )


def render_readme() -> str:
    """Return the README with the table of the stored results."""
    table = markdown(("what", "result", "command"), _rows_of_readme())
    pattern = r"^\| what \| result \| command \|\n(?:\|.*\n)+"
    text, count = re.subn(pattern, lambda _: f"{table}\n", README.read_text(), flags=re.MULTILINE)
    assert count == 1, "README.md has no table `what | result | command`"
    return text


def _rows_of_readme() -> list[tuple[str, str, str]]:
    found, ratios = load(), step_ratios()
    fsdp = ratios.pop("paral_fsdp")
    (direct, _) = found["fsdp_step_direct"]["json"][0]["rows"]
    four = found["all_reduce"]["json"][-1]
    ring, native = (
        row_of(four, algorithm=algorithm, wire=wire, size_bytes=25 * MIB)["seconds"] * 1e3
        for algorithm, wire in (("ring", "bf16"), ("native", "fp32"))
    )
    (saved,) = found["checkpoint"]["json"][0]["rows"]
    steps = ", ".join(f"`{name}` {ratio:.2f}" for name, ratio in ratios.items())
    in_background = f"with `async_save=True`, training waits {saved['stall']:.2f} s"
    rows = {
        "ddp_step": ("training step, relative to a hand-written loop", steps),
        "fsdp_step": (
            "training step under `paral_fsdp`",
            f"{fsdp:.2f}; {direct['ratio']:.2f} if the loop has our reduce-scatter instead of gloo's own",
        ),
        "all_reduce": (
            f"all-reduce of 25 MiB, {four['num_ranks']} nodes at 1 Gbit/s",
            f"ring with bf16 on the wire {ring:.0f} ms, gloo's own {native:.0f} ms",
        ),
        "checkpoint": (
            f"saving {saved['size_bytes'] / 1e9:.1f} GB, sharded",
            f"{saved['save']:.2f} s; {in_background}; gathering on rank 0 {saved['full']:.2f} s",
        ),
    }
    return [(what, result, f"`{BENCHMARKS[name][-1]}`") for name, (what, result) in rows.items()]
