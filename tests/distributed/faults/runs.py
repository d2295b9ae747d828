"""Start the run of a case, wait until all of its processes have ended, and read what it printed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.faults.cases import Case
from tests.launching import ROOT

RUN_ID = "PARAL_FAULT_RUN"
"""The environment variable that all processes of a run inherit."""

START_SECONDS = 240.0
END_SECONDS = 60.0
"""How long a run may go on after its failure. What is left then is an orphan, and is killed."""

LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")
LAST_LINES = {"python": 10, "torchrun": 35}
"""How many lines are the end of the output: torchrun adds about 30 of its own."""

stopping = threading.Event()
"""Set to end all runs."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    case: Case
    has_failed: bool
    """Whether the rank reached its fault."""
    shown: bool
    """Whether the output has the cause: the error and its line of code, or which rank ended and how."""
    times: int
    """How often the ranks printed the traceback, not counting torchrun's summary."""
    seconds: float
    """From the failure to the end of the last process."""
    orphans: int
    """The number of processes left `END_SECONDS` after the failure."""
    status: int
    """The exit status of the launcher."""
    output: str
    """The last lines of what the run printed."""

    def faults(self, seconds: float = 10.0) -> list[str]:
        """Return what is wrong with the end of the run, which may take `seconds`; empty if nothing is."""
        if not self.has_failed:
            return ["the fault was not reached"]
        case = self.case
        ends_by_itself = case.fault == "os_exit_0" and case.rank == 0 and case.launcher == "python"
        found = {
            "cause not shown": not self.shown,
            f"traceback {self.times} times": self.shown and case.has_traceback and self.times != 1,
            f"{self.seconds:.1f} s": self.seconds > seconds,
            f"{self.orphans} orphans": self.orphans > 0,
            f"status {self.status}": self.status == 0 and not ends_by_itself,
        }
        return [name for name, is_wrong in found.items() if is_wrong]


def run(case: Case) -> Result:
    """Run the case and kill whatever it leaves."""
    with tempfile.TemporaryDirectory(prefix="paral-fault-") as made, ExitStack() as stack:
        folder = Path(made)
        # A file and not a pipe, so that nothing waits for a reader
        output = stack.enter_context((folder / "output").open("wb"))
        identity = uuid.uuid4().hex
        stack.callback(_kill_all, identity)
        launcher = _start(case, folder, identity, output)
        failed, ended = _wait(case, folder, identity, launcher)
        orphans = _kill_all(identity)
        status = launcher.wait(timeout=30)
        printed = (folder / "output").read_text(errors="replace")
    return Result(
        case=case,
        has_failed=failed is not None,
        shown=_shows(case, printed),
        times=count_tracebacks(printed),
        seconds=round(ended - failed, 2) if failed is not None else 0.0,
        orphans=orphans,
        status=status,
        output=_last_lines(case, printed),
    )


def _start(case: Case, folder: Path, identity: str, output: Any) -> "subprocess.Popen[bytes]":
    """Start the launcher in a process group of its own, as a shell with a terminal does."""
    command = [sys.executable, str(Path(__file__).with_name("failing.py")), str(case), str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {RUN_ID: identity, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if case.launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(case: Case, folder: Path, identity: str, launcher: "subprocess.Popen[bytes]") -> tuple[float | None, float]:
    """Wait until no process of the run is left. Return the times of the failure, or `None`, and of the end."""
    marker = folder / "failed"
    failed: float | None = None
    deadline = time.time() + START_SECONDS
    while True:
        if failed is None and marker.exists():
            failed = _end_from_outside(case, launcher) or float(marker.read_text())
            deadline = failed + END_SECONDS
        # For a moment after its start, the environment of a process is empty.
        is_running = launcher.poll() is None
        now = time.time()
        if stopping.is_set() or now > deadline or not (is_running or _processes(identity)):
            return failed, now
        time.sleep(0.1)


def _end_from_outside(case: Case, launcher: "subprocess.Popen[bytes]") -> float | None:
    """If the fault comes from outside of the ranks, cause it now, and return the time."""
    if case.fault not in ("ctrl_c", "launcher_killed"):
        return None
    time.sleep(0.3)  # during the training
    now = time.time()
    with suppress(ProcessLookupError):
        if case.fault == "ctrl_c":
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            launcher.kill()
    return now


def _processes(identity: str) -> list[psutil.Process]:
    """Return the processes of a run, without zombies, which have no environment any more."""
    found = psutil.process_iter(["environ"])
    return [each for each in found if (each.info["environ"] or {}).get(RUN_ID) == identity]


def _kill_all(identity: str) -> int:
    """Kill what is left of a run, and return how many processes it was."""
    left: set[int] = set()
    while found := _processes(identity):
        for process in found:
            left.add(process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)
    return len(left)


def _last_lines(case: Case, printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES[case.launcher] :])


def count_tracebacks(printed: str) -> int:
    """Return how often the ranks printed the traceback of the error, not counting torchrun's summary.

    The message that a rank prints about the error of another one may quote a traceback: torch puts that of a loader's
    worker into the message of the error. Such a quotation is within a line.
    """
    of_ranks = re.split(r"^=+\n.* FAILED", printed, maxsplit=1, flags=re.MULTILINE)[0]
    return len(re.findall(r"^(?:\[\w+\]:)?\s*raise TypoError\(f", of_ranks, flags=re.MULTILINE))


_NAMES = {
    "exit_0": r"SystemExit|sys\.exit|exit(ed)?\b|status|ended|exitcode",
    "exit_3": r"SystemExit: 3|exit\w* .*3|status 3|exitcode\s*: 3",
    "sigkill": r"SIGKILL|[Ss]ignal 9|Killed",
    "sigsegv": r"SIGSEGV|[Ss]ignal 11|Segmentation fault",
    "os_exit_0": r"exit(ed)?\b|status|died|ended|exitcode",
    "os_exit_1": r"exit(ed)?\b|status 1|died|ended|exitcode\s*: 1",
    "launcher_killed": r"SIGKILL|[Ss]ignal 9|died|[Ee]nded",
}


def _shows(case: Case, printed: str) -> bool:
    """Return whether `printed` has the cause, and the line of code that raised it."""
    if case.fault == "ctrl_c":
        return re.search(r"KeyboardInterrupt|SIGINT|[Ii]nterrupted by|signal:? 2\b", printed) is not None
    if case.stage == "loader" and case.fault == "sigkill":
        return re.search(r"DataLoader worker .*(killed|exited)", printed) is not None
    if case.has_traceback:
        message = f"TypoError: the typo of rank {case.rank}"
        return message in printed and "raise TypoError(f" in printed
    if case.fault == "launcher_killed":
        rank = r"[Rr]ank 0|process that (started|launched)|[Ll]auncher|torchrun"
    else:
        # "rank 1 (node) died: ...", and the lines of torchrun's summary: "rank      : 1 (local_rank: 1)"
        rank = rf"[Rr]ank\s*:?\s*{case.rank}\b"
    how = _NAMES[case.fault]
    if case.rank == 0 and case.launcher == "python":
        how += r"|died|ended"  # rank 0 was started by the user, and no other rank knows its status
    return re.search(rf"({rank}).{{0,300}}?({how})", printed, re.DOTALL) is not None
