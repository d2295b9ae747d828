"""DeepSpeed's operators, compiled while tests run that need none: `python -m tests.compile_operators NAMES`.

An operator that is already compiled is only loaded. Of two processes that need the same operator, one waits.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.contract.cases import BY_LABEL

MARK = "deepspeed_operators"
"""The marker of tests that wait for operators. Its arguments are their names; without arguments all are needed."""
NEEDS = ("async_io",)
"""The operators, which offload to NVMe needs."""
HOUR = 3600


def mark_by_parameters(item: pytest.Item) -> None:
    """Mark the test if a parameter is the label of a case that needs operators, or a list with such a label.

    Tests in tests/unit train nothing.
    """
    parameters = None if item.nodeid.startswith("tests/unit/") else getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters else ():
        for label in value if isinstance(value, list | tuple) else (value,):
            case = BY_LABEL.get(label) or BY_LABEL.get(f"paral_{label}") if isinstance(label, str) else None
            if case is not None and case.operators:
                item.add_marker(pytest.mark.deepspeed_operators(*case.operators))


def operators_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of the operators that a test waits for."""
    marked = [mark.args or NEEDS for mark in item.iter_markers(MARK)]
    return tuple(name for name in NEEDS if any(name in names for names in marked))


class Compilation:
    """Compiles operators in a process of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.compile_operators", *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._printed: list[str] = []

    def wait_for(self, name: str) -> None:
        """Return when the operator is compiled. Skip the test if this machine lacks what compiles it."""
        assert self._process.stdout is not None
        while (said := self._said_of(name)) is None:
            line = self._process.stdout.readline()
            assert line, "".join([f"{name} did not compile:\n", *self._printed])
            self._printed.append(line)
        if said != "compiled":
            pytest.skip(said)

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)  # includes the compilers
            self._process.communicate(timeout=30)

    def _said_of(self, name: str) -> str | None:
        said = [line.partition(": ")[2].strip() for line in self._printed if line.startswith(f"{name}: ")]
        return said[0] if said else None


def compile_or_say_what_is_missing(names: Iterable[str]) -> None:
    """Print for each operator `compiled`, or what to install."""
    from lightning_paral.engines.zero.offload import load_operators

    for name in NEEDS:
        if name in names:
            missing = what_is_missing_for(name)
            if not missing:
                load_operators("the tests")
            print(f"{name}: {missing or 'compiled'}", flush=True)


def what_is_missing_for(operator: str) -> str:
    """Return a sentence on what this machine lacks to compile an operator, and what to do. Empty if it can."""
    from lightning_paral.engines.zero.offload import check_compiler
    from lightning_paral.errors import ConfigurationError

    try:
        check_compiler("Offload")
    except ConfigurationError as error:
        return f"DeepSpeed's operator {operator!r} cannot be compiled here. To run the test: {error}"
    return ""


def skip_unless_compilable(operator: str) -> None:
    """Skip the test if this machine cannot compile an operator. For tests of checks, which do not wait for it."""
    if missing := what_is_missing_for(operator):
        pytest.skip(missing)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    signal.alarm(HOUR)
    compile_or_say_what_is_missing(sys.argv[1:])
