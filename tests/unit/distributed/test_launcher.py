"""What the launcher reports if a signal handler raises an error while another one is being reported."""

import signal

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_paral.distributed.launcher import ScriptLauncher


class Run:
    """A run in which a signal arrives while its first error is reported, as when a worker of a loader was killed."""

    is_in_run = True

    def __init__(self) -> None:
        self.reported: list[BaseException] = []

    def report_failure(self, error: BaseException) -> BaseException:
        if not self.reported:
            self.reported.append(error)
            signal.raise_signal(signal.SIGALRM)
        self.reported.append(error)
        return error

    def report_death(self, rank: int, how: str) -> None:
        raise AssertionError


def fail() -> None:
    raise ConnectionResetError("of the worker's pipe")


def handle(signum: int, frame: object) -> None:
    raise RuntimeError("DataLoader worker is killed by signal: Killed.")


def test_error_of_a_signal_handler_that_interrupts_the_report_is_reported() -> None:
    run = Run()
    launcher = ScriptLauncher(LightningEnvironment(), 1, 1, run=lambda: run)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(RuntimeError, match="is killed by signal") as raised:
            launcher.launch(fail)
    finally:
        signal.signal(signal.SIGALRM, before)

    assert run.reported[-1] is raised.value
    assert isinstance(raised.value.__context__, ConnectionResetError)
