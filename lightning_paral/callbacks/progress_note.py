"""A small file with the progress of a run, which the next start of the run reads."""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = ".auto_resume.json"
_INTERVAL_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The progress of a run at some time."""

    global_step: int
    time: float
    """In seconds since 1970."""
    start: str = ""
    """A name for the start of the run, different for each."""


class ProgressNote:
    """Writes the global step to a file in `folder` once per second while it changes, in a thread.

    After a kill, the file has the step that the run had reached at most a second earlier. Training does not wait for
    the file. If another start of the run writes to the same file, which happens if nodes train apart from each other,
    an error is logged.

    Args:
        folder: the folder; it is created if it does not exist.
        read_step: returns the global step; called in the thread.
    """

    def __init__(self, folder: Path, read_step: Callable[[], int]) -> None:
        self._path = folder / FILE_NAME
        self._read_step = read_step
        self._start = uuid.uuid4().hex
        self._written = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_repeatedly, name="lightning_paral_progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write the last step, and stop."""
        self._ended.set()
        self._thread.join()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a thread belongs to one process."""
        return type(None), ()

    def _write_repeatedly(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(_INTERVAL_SECONDS)
            step = self._read_step()
            if step == self._written:
                continue
            last = read_progress(self._path.parent)
            if self._written >= 0 and last is not None and last.start != self._start:
                log.error(
                    "Another start of this run saves to %s at the same time, at step %d. End one of them: each "
                    "replaces the checkpoints of the other.",
                    *(self._path.parent, last.global_step),
                )
                return
            draft = self._path.with_suffix(f".{os.getpid()}")
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                draft.write_text(json.dumps(asdict(Progress(step, time.time(), self._start))))
                os.replace(draft, self._path)
            except OSError as error:  # the note is a convenience; saving checkpoints reports a full disk
                log.info("The progress of the run cannot be noted in %s: %s", self._path, error)
                return
            self._written = step


def read_progress(folder: Path) -> Progress | None:
    """Return what the previous run has written to `folder`; `None` if there is no such file, or it is unreadable."""
    try:
        content = json.loads((folder / FILE_NAME).read_text())
        return Progress(int(content["global_step"]), float(content["time"]), str(content.get("start", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
