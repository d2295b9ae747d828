"""Real processes of which one is stopped by a signal, as by a debugger or a scheduler."""

from pathlib import Path

from tests.launching import outputs


def test_run_ends_although_rank_0_is_stopped_and_its_store_does_not_answer(launch, tmp_path: Path) -> None:
    process = launch("-m", "tests.distributed.hangs.stopped", str(tmp_path))

    (printed,) = outputs(process)  # ends only when every process that holds the pipe has ended

    assert process.returncode == -9  # rank 0 cannot end by itself
    assert "set by `ParalDDPStrategy(timeout=...)`" in printed
    assert f"Rank 0 (process {process.pid}) is stopped, and the run has failed: killing it." in printed
