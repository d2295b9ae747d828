"""How processes end after a run that failed or was preempted, if user code handles the error or takes its time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch.test_launch import LAUNCHERS, ROOT


def run(command: list[str], folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(["-m", "tests.distributed.launch.ending_script", *arguments])


@pytest.mark.parametrize("part", ["handled", "raising hook"])
def test_ranks_that_handle_the_error_end_in_their_own_time(part: str) -> None:
    ended = script(part)

    assert ended.returncode == 0, ended.stderr
    # Nothing of the run is left that could end the process later, also if Lightning skipped the teardown.
    assert sorted(line for line in ended.stdout.splitlines() if "handled" in line) == [
        "rank 0: handled, []",
        "rank 1: handled, []",
    ]


@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_the_cause_is_printed_once_if_the_failed_rank_takes_long_to_end(start_method: str) -> None:
    ended = script("slow hook", start_method)

    assert ended.returncode == 1
    assert ended.stderr.count('raise ValueError("my bug")') == 1, ended.stderr
    assert "ValueError: my bug" in "".join(ended.stderr.splitlines()[-6:]), ended.stderr


def test_preempted_ranks_exit_with_their_status_however_long_one_of_them_takes(tmp_path: Path) -> None:
    ended = script("preempted", "popen", str(tmp_path))

    assert ended.returncode == 0, ended.stderr
    assert "rank 0: uploaded" in ended.stdout
    assert "ended outside of a run" not in ended.stderr
    assert "called sys.exit" not in ended.stderr
    assert len(list(tmp_path.glob("preempted-step=*.ckpt"))) == 1


def test_two_fits_that_run_the_script_again_in_one_session_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(
        "from pathlib import Path\n"
        "import pytest\n"
        "from lightning_paral import ParalDDPStrategy\n"
        "from tests.models.regression import Regression, regression_data\n"
        "from tests.running import quiet_trainer\n\n"
        "@pytest.mark.parametrize('number', [1, 2])\n"
        "def test_fit(number):\n"
        "    strategy = ParalDDPStrategy(start_method='popen')\n"
        "    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1)\n"
        "    trainer.fit(Regression(), regression_data(4, 2))\n"
        "    assert trainer.global_step == 4\n"
        "    Path(__file__).with_name(f'{number} on rank {trainer.global_rank}').touch()\n"
    )
    ended = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_user.py"], tmp_path)

    assert ended.returncode == 0, ended.stdout[-3000:]
    assert sorted(path.name for path in tmp_path.glob("* on rank *")) == [
        f"{number} on rank {rank}" for number in (1, 2) for rank in (0, 1)
    ]
