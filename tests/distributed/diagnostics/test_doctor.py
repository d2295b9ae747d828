"""`paral doctor` on real ranks."""

import json
import signal
import time
from contextlib import suppress

import psutil
import pytest

from lightning_paral import STRATEGIES
from lightning_paral.diagnostics.doctor.collectives import COLLECTIVES
from lightning_paral.diagnostics.doctor.processes import CollectiveRow, run_collectives
from tests.launching import outputs

RANK = "lightning_paral.diagnostics.doctor.rank"
INTERRUPTED = "from lightning_paral.diagnostics.doctor.processes import run_collectives; run_collectives(1)"


def ranks_of(parent: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the ranks that `parent` has started."""
    found = []
    for child in parent.children():
        with suppress(psutil.ZombieProcess):  # of another test
            if RANK in child.cmdline():
                found.append(child)
    return found


def assert_ended(ranks: list[psutil.Process]) -> None:
    _, running = psutil.wait_procs(ranks, timeout=60)
    assert not running


def test_every_collective_answers(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARAL_NVME_PATH", raising=False)
    process = launch("-m", "lightning_paral", "doctor", "--ranks", "2", "--json")
    (printed,) = outputs(process)
    assert process.returncode == 0, printed
    found, _ = json.JSONDecoder().raw_decode(printed, printed.index("{"))
    rows = {row["name"]: row for row in found["collectives"]["rows"]}
    assert list(rows) == ["start", *COLLECTIVES]
    assert {row["state"] for row in rows.values()} == {"ok"}
    assert all(row["latency"] > 0 for row in rows.values())
    assert all(rows[name]["bandwidth"] > 0 for name in COLLECTIVES if name != "barrier")
    assert [entry["name"] for entry in found["strategies"]] == [entry.name for entry in STRATEGIES]
    assert found["broken"] == []


def test_a_rank_that_is_stopped_or_killed_is_named_and_none_is_left() -> None:
    started: list[psutil.Process] = []
    signals = iter((signal.SIGSTOP, signal.SIGKILL))

    def end_rank_1(row: CollectiveRow) -> None:
        if row.name in ("start", "all-reduce"):
            ranks = ranks_of(psutil.Process())
            started.extend(ranks)
            next(rank for rank in ranks if '"rank": 1' in rank.cmdline()[-1]).send_signal(next(signals))

    results = run_collectives(2, names=("broadcast", "all-reduce", "barrier"), seconds=5.0, on_row=end_rank_1)

    start, stopped, sound, killed = results.rows
    assert (start.state, stopped.state, sound.state, killed.state) == ("ok", "failed", "ok", "failed")
    assert stopped.reason == "no answer in 5 s: the process of rank 1 is stopped"
    assert killed.reason.startswith("rank 1 died: its process was killed by SIGKILL")
    assert len({rank.pid for rank in started}) == 4  # new ones ran what remained after the first failure
    assert_ended(started)


def test_nothing_is_left_after_ctrl_c(launch) -> None:
    process = launch("-c", INTERRUPTED)
    deadline = time.monotonic() + 120
    while len(ranks := ranks_of(psutil.Process(process.pid))) < 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no rank was started"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    (printed,) = outputs(process)

    assert printed.strip().endswith("KeyboardInterrupt")
    assert_ended(ranks)  # one that was starting ends when it finds its input closed
