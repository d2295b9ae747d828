"""The generated parts of docs/correctness.md and docs/measurements.md, and their plots, from the stored results."""

from typing import Any

from tests.benchmarks.measure import BENCHMARKS
from tests.benchmarks.results import load
from tests.docs.bench_tables import TABLES, step_table
from tests.docs.charts import Panel, Plot

ONE_PROCESS = "one process"
STEPS = {"paral_ddp": "ddp_step", "paral_fsdp": "fsdp_step"} | {f"paral_zero{n}": f"zero{n}_step" for n in (1, 2, 3)}
"""The benchmark of a training step, by strategy."""
SAVES = (("save", "save", "full", "gathering"), ("async_save=True", "stall", "save", "the save above"))
"""Label, fields of the benchmark `checkpoint` that are divided, and what the ratio is relative to."""
SHOWN_STEPS = (1, 2, 5, 10, 20)


def blocks_of_correctness() -> dict[str, str]:
    """Return the generated blocks of the page, by name."""
    record = load()["correctness"]
    losses = ["| | " + " | ".join(f"step {step}" for step in SHOWN_STEPS) + " | validation |"]
    losses += ["|---" * (len(SHOWN_STEPS) + 2) + "|"]
    differences = ["| | training loss | validation loss | weights |", "|---|---|---|---|"]
    for name, row in record["rows"].items():
        shown = name if name == ONE_PROCESS else f"`{name}`"
        values = [*(row["training"][step - 1] for step in SHOWN_STEPS), row["validation"]]
        losses += [f"| {shown} | " + " | ".join(f"{value:.6f}" for value in values) + " |"]
        if name != ONE_PROCESS:
            found = [row[f"{kind}_difference"] for kind in ("training", "validation", "weight")]
            differences += [f"| {shown} | " + " | ".join(f"{value:.1e}" for value in found) + " |"]
    command = "python -m tests.benchmarks.correctness --write"
    return {
        "differences": "\n".join(differences),
        "losses": "\n".join(losses),
        "measured": _measured_with(record, command),
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
    return {
        name: f"{_shown(name, record)}\n\n{_measured_with(record, BENCHMARKS[name].command)}"
        for name, record in load().items()
        if name in BENCHMARKS
    }


def step_ratios() -> dict[str, float]:
    """Return the time of a step divided by that of the hand-written loop, by strategy."""
    found = load()
    return {name: found[benchmark]["json"][0]["rows"][0]["ratio_to_raw"] for name, benchmark in STEPS.items()}


def measured_plot() -> Plot:
    """Return the plot of times relative to hand-written code."""
    found = load()
    steps = step_ratios()
    (saved,) = found["checkpoint"]["json"][0]["rows"]
    saves = [(label, saved[which] / saved[other], beside) for label, which, other, beside in SAVES]
    return Plot(
        panels=[
            Panel(
                title="A training step, by strategy",
                rows=[(name, ratio, f"{ratio:.2f}") for name, ratio in steps.items()],
                limits=(0.0, 1.25),
                reference=1.0,
                reference_label="time relative to a hand-written loop; dashed: equal",
            ),
            Panel(
                title="A checkpoint of 2.4 GB under paral_fsdp",
                rows=[(label, ratio, f"{ratio:.2f} of {beside}") for label, ratio, beside in saves],
                limits=(0.0, 1.25),
                reference=1.0,
                reference_label="time relative to what the row names; dashed: equal",
            ),
        ]
    )


def _shown(name: str, record: dict[str, Any]) -> str:
    """Return the table of a benchmark's JSON, or what it printed; for older records, the table that they have."""
    if "json" in record:
        return TABLES.get(name, step_table)(record["json"])
    return f"```text\n{record['printed']}\n```" if "printed" in record else str(record["table"]).rstrip()


def _measured_with(record: dict[str, Any], command: str) -> str:
    commands = "<br>\n".join(f"`{line}`" for line in command.split(" && "))
    return f"{commands}<br>\n{record['date']}, {record['with']}"
