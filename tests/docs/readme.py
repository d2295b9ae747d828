"""The table of measured results in the README."""

import re
from pathlib import Path

from tests.benchmarks.measure import BENCHMARKS
from tests.benchmarks.results import load
from tests.docs.bench_tables import row_of
from tests.docs.results_pages import step_ratios

README = Path(__file__).parents[2] / "README.md"
BUCKET = 25 * 2**20


def render_readme() -> str:
    """Return the README with the table of the stored results."""
    text, count = re.subn(
        r"^\| what \| result \| command \|\n(?:\|.*\n)+",
        lambda _: "\n".join(_lines()) + "\n",
        README.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1, "README.md has no table `what | result | command`"
    return text


def _lines() -> list[str]:
    found = load()
    ratios = step_ratios()
    fsdp = ratios.pop("paral_fsdp")
    (direct, _) = found["fsdp_step_direct"]["json"][0]["rows"]
    four = found["all_reduce"]["json"][-1]
    ring, native = (row_of(four, *case, BUCKET)["seconds"] * 1e3 for case in (("ring", "bf16"), ("native", "fp32")))
    (saved,) = found["checkpoint"]["json"][0]["rows"]
    steps = ", ".join(f"`{name}` {ratio:.2f}" for name, ratio in ratios.items())
    rows = [
        ("training step, relative to a hand-written loop", steps, "ddp_step"),
        (
            "training step under `paral_fsdp`",
            f"{fsdp:.2f}; {direct['ratio_to_raw']:.2f} if the loop has our reduce-scatter instead of gloo's own",
            "fsdp_step",
        ),
        (
            f"all-reduce of 25 MiB, {four['num_ranks']} nodes at 1 Gbit/s",
            f"ring with bf16 on the wire {ring:.0f} ms, gloo's own {native:.0f} ms",
            "all_reduce",
        ),
        (
            f"saving {saved['size_bytes'] / 1e9:.1f} GB, sharded",
            f"{saved['save']:.2f} s; with `async_save=True`, training waits {saved['stall']:.2f} s; gathering on "
            f"rank 0 {saved['full']:.2f} s",
            "checkpoint",
        ),
    ]
    return [
        "| what | result | command |",
        "|---|---|---|",
        *(f"| {what} | {result} | `{BENCHMARKS[name].command.split(' && ')[-1]}` |" for what, result, name in rows),
    ]
