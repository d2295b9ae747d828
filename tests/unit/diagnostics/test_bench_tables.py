"""The tables of `paral bench` fit into 80 columns, and its plots can be written."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from lightning_paral.diagnostics.bench.adam import OPTIMIZERS, AdamResults, AdamRow
from lightning_paral.diagnostics.bench.adam_report import adam_table, plot_adam
from lightning_paral.diagnostics.bench.checkpoint import CheckpointResults, CheckpointRow
from lightning_paral.diagnostics.bench.checkpoint_report import checkpoint_table, plot_checkpoint
from lightning_paral.diagnostics.bench.comm import ALGORITHMS, CommResults, comm_row
from lightning_paral.diagnostics.bench.comm_report import comm_table, plot_comm
from lightning_paral.diagnostics.bench.machine import this_machine
from lightning_paral.diagnostics.bench.memory import MemoryResults, MemoryRow
from lightning_paral.diagnostics.bench.memory_report import memory_table, plot_memory
from lightning_paral.diagnostics.bench.step_report import plot_step, step_table
from lightning_paral.diagnostics.bench.step_results import StepResults, StepRow
from lightning_paral.plots import save_figure

MIB = 2**20
COMM = CommResults(
    num_ranks=4,
    backend="gloo",
    point_to_point_bandwidth=1e9,
    rows=tuple(
        comm_row((algorithm, wire), size * MIB, 0.123 * (number + 1), num_rounds=10, world_size=4, bandwidth=1e9)
        for size in (1, 256)
        for number, algorithm in enumerate(ALGORITHMS)
        for wire in ("fp32", "bf16")
    ),
)


def seconds_of(strategy: str, *seconds: float | None) -> CheckpointRow:
    phases = ("save", "stall", "full", "load", "consolidate", "write", "read")
    return CheckpointRow(strategy=strategy, size_bytes=303 * MIB, **dict(zip(phases, seconds, strict=True)))


MODULE: dict[str, Any] = {"module": "GPT", "num_params": 870_000}
STEP_ROW = StepRow(
    strategy="paral_zero3",
    seconds=0.708,
    num_steps=60,
    samples_per_second=12345.0,
    start_seconds=16.14,
    peak_host_bytes=995 * MIB,
    peak_device_bytes=None,
    sent_bytes=14.2 * MIB,
    ratio_to_raw=0.87,
    ratio_to_lightning=None,
)
STEP = StepResults(
    **MODULE, num_ranks=2, batch_size=8, rows=(STEP_ROW, replace(STEP_ROW, strategy="raw_ddp", ratio_to_raw=None))
)
CHECKPOINT = CheckpointResults(
    **MODULE,
    num_ranks=2,
    is_cold=False,
    rows=(
        seconds_of("paral_zero3", 1.43, 0.551, 12.3, 0.123, 12.3, 0.234, 0.0123),
        seconds_of("ddp", 1.43, None, None, 0.1, None, 0.2, 0.1),
    ),
)
ADAM = AdamResults(
    rows=tuple(
        AdamRow(optimizer=name, num_threads=2, num_params=200_000_000, seconds=0.123, num_rounds=9, ratio=12.34)
        for name in OPTIMIZERS
    )
)
MEMORY_ROW = MemoryRow(
    strategy="paral_zero3",
    num_ranks=16,
    device="cpu",
    start_seconds=123.4,
    is_sharded=True,
    start_bytes=12345 * MIB,
    peak_bytes=34567 * MIB,
    limit_bytes=23456 * MIB,
    formula_bytes=12345 * MIB,
    planned_bytes=12345 * MIB,
)
MEMORY = MemoryResults(
    **MODULE,
    batch_size=1,
    unit_bytes=50 * MIB,
    activation_bytes=38 * MIB,
    notes=("The step cannot be followed.",),
    rows=(MEMORY_ROW, replace(MEMORY_ROW, strategy="raw_fsdp", num_ranks=1, peak_bytes=MIB)),
)
REPORTS = [
    (memory_table, plot_memory, MEMORY),
    (comm_table, plot_comm, COMM),
    (step_table, plot_step, STEP),
    (checkpoint_table, plot_checkpoint, CHECKPOINT),
    (adam_table, plot_adam, ADAM),
]
IDS = ["memory", "comm", "step", "checkpoint", "adam"]


def printed(table: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("table", "plot", "results"), REPORTS, ids=IDS)
def test_table_fits_into_80_columns(table: Any, plot: Any, results: Any) -> None:
    narrow, wide = (printed(table(results), width) for width in (80, 120))

    assert "…" not in narrow
    # The notes below the tables are folded, rows are not: all lines of the tables are equal.
    lines = [line.split() for line in narrow.splitlines() if "─" not in line]
    rows = [line.split() for line in wide.splitlines() if "─" not in line]
    count = rows.index([], 1)
    assert count > 2
    assert lines[:count] == rows[:count]


@pytest.mark.parametrize(("table", "plot", "results"), REPORTS, ids=IDS)
def test_plot_is_a_picture(tmp_path: Path, table: Any, plot: Any, results: Any) -> None:
    pytest.importorskip("matplotlib")
    save_figure(plot(results), str(tmp_path / "plot.png"))

    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_memory_above_the_limit_is_named() -> None:
    text = " ".join(printed(memory_table(MEMORY), 120).split())

    assert "above the limit: paral_zero3 on 16." in text
    assert "above DDP: none." in text
    assert "The step cannot be followed." in text


def test_bandwidths_are_those_of_nccl_tests() -> None:
    row = comm_row(("ring", "fp32"), 4_000_000, 0.002, num_rounds=3, world_size=4, bandwidth=6e9)

    assert row.algbw == pytest.approx(2e9)
    assert row.busbw == pytest.approx(3e9)  # 2 * (4 - 1) / 4
    assert row.share == pytest.approx(0.5)


def test_narrow_wire_sends_half_and_reduce_scatter_half() -> None:
    def busbw(case: tuple[str, str]) -> float:
        return comm_row(case, 4_000_000, 0.002, num_rounds=3, world_size=4, bandwidth=1e9).busbw

    assert busbw(("native", "bf16")) == pytest.approx(busbw(("native", "fp32")) / 2)
    assert busbw(("reduce_scatter_direct", "fp32")) == pytest.approx(busbw(("native", "fp32")) / 2)


def test_results_survive_json() -> None:
    assert CommResults.from_json(COMM.as_json()) == COMM


def test_machine_names_what_was_measured_with() -> None:
    machine = this_machine()

    assert machine.num_cores >= 1
    assert {"Python", "lightning_paral", "torch", "lightning", "deepspeed"} == set(machine.versions)
    assert all(version in machine.describe() for version in machine.versions.values())
