"""DeepSpeed's operators for NVMe, compiled while tests run that need none: `python -m tests.compile_operators`.

Operators that are already compiled are only loaded.
"""

import os
import signal
import subprocess
import sys
from functools import cached_property

import pytest

from tests.contract.cases import BY_LABEL

MARK = "deepspeed_operators"
"""The marker of tests that wait for the operators."""
HOUR = 3600


def mark_by_parameters(item: pytest.Item) -> None:
    """Mark the test if a parameter is the label of a case that needs operators, or a list with such a label.

    Tests in tests/unit train nothing.
    """
    parameters = None if item.nodeid.startswith("tests/unit/") else getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters else ():
        for label in value if isinstance(value, list | tuple) else (value,):
            case = BY_LABEL.get(label) or BY_LABEL.get(f"paral_{label}") if isinstance(label, str) else None
            if case is not None and case.needs_operators:
                item.add_marker(MARK)


def needs_operators(item: pytest.Item) -> bool:
    """Return whether a test waits for the operators."""
    return item.get_closest_marker(MARK) is not None


class Compilation:
    """Compiles the operators in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.compile_operators"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @cached_property
    def _printed(self) -> str:
        return self._process.communicate()[0]

    def wait(self) -> None:
        """Return when the operators are compiled. Skip the test if this machine lacks what compiles them."""
        said = self._printed.splitlines()[-1:]
        assert self._process.returncode == 0, f"The operators did not compile:\n{self._printed}"
        if said != ["compiled"]:
            pytest.skip(*said)

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)  # includes the compilers
            self._process.communicate(timeout=30)


def what_is_missing() -> str:
    """Return a sentence on what this machine lacks to compile the operators, and what to do. Empty if it can."""
    from lightning_paral.engines.zero.offload import check_compiler
    from lightning_paral.errors import ConfigurationError

    try:
        check_compiler("Offload")
    except ConfigurationError as error:
        return f"DeepSpeed's operators cannot be compiled here. To run the test: {error}"
    return ""


def skip_unless_compilable() -> None:
    """Skip the test if this machine cannot compile the operators. For tests of checks, which do not wait for them."""
    if missing := what_is_missing():
        pytest.skip(missing)


if __name__ == "__main__":
    from lightning_paral.engines.zero.offload import load_operators

    os.environ["DS_ACCELERATOR"] = "cpu"
    signal.alarm(HOUR)
    if not (_missing := what_is_missing()):
        load_operators("the tests")
    print(_missing or "compiled", flush=True)
