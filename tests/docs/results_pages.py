"""What docs/correctness.md and docs/measurements.md show of the stored results, and their plots."""

from typing import Any

from lightning_paral import STRATEGIES
from tests.benchmarks.measure import BENCHMARKS
from tests.benchmarks.results import load
from tests.docs.charts import Chart, log10

ONE_PROCESS = "one process"
PLOTTED = (
    ("paral_ddp, a step", "ddp_step", "step", "the hand-written loop"),
    ("paral_fsdp, a step", "fsdp_step", "step", "the hand-written loop"),
    ("paral_zero1, a step", "zero1_step", "step", "the hand-written loop"),
    ("paral_zero2, a step", "zero2_step", "step", "the hand-written loop"),
    ("paral_zero3, a step", "zero3_step", "step", "the hand-written loop"),
    ("paral_fsdp, a save", "checkpoint", "sharded save", "gathering and torch.save"),
    ("the same, async_save", "checkpoint", "async save", "the save before it"),
)
"""Label, benchmark, which of its ratios, and what it is relative to."""
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


def correctness_chart() -> str:
    """Return the plot of the largest differences."""
    rows = load()["correctness"]["rows"]
    found = {entry.name: rows[entry.name]["training_difference"] for entry in STRATEGIES}
    return Chart(
        title="Training losses equal those of one process",
        subtitle="Largest relative difference over 20 steps of a small GPT, 2 ranks, fp32",
        rows=[(name, value, f"{value:.1e}" if value else "0") for name, value in found.items()],
        ticks=[(10.0**exponent, f"1e{exponent}") for exponent in range(-9, -1)],
        marked=1.2e-7,
        marked_as="precision of fp32",
        scale=log10,
    ).render()


def blocks_of_measurements() -> dict[str, str]:
    """Return the generated blocks of the page, by the names of the benchmarks."""
    return {
        name: f"{_shown(record)}\n\n{_measured_with(record, BENCHMARKS[name].command)}"
        for name, record in load().items()
        if name in BENCHMARKS
    }


def measured_chart() -> str:
    """Return the plot of times next to hand-written code."""
    found = load()
    ratios = [(label, found[name]["ratios"][which], beside) for label, name, which, beside in PLOTTED]
    return Chart(
        title="Time next to hand-written code",
        subtitle="Divided by the time of what stands beside the dot; 2 ranks on 2 CPU cores, gloo",
        rows=[(label, ratio, f"{ratio:.2f} times {beside}") for label, ratio, beside in ratios],
        ticks=[(number / 4, f"{number / 4:g}") for number in range(6)],
        marked=1.0,
        marked_as="the same time",
    ).render()


def _shown(record: dict[str, Any]) -> str:
    """Return what a benchmark printed; for those measured before it was stored, the table made of it."""
    return f"```text\n{record['printed']}\n```" if "printed" in record else str(record["table"]).rstrip()


def _measured_with(record: dict[str, Any], command: str) -> str:
    return f"`{command}`<br>\n{record['date']}, {record['with']}"
