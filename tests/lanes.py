"""Markers that tests get by rule: for the fast lane, `-m "not deepspeed and not slow"`, and for the sets of CI."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from lightning_paral import ParalZeROStrategy
from tests.contract.cases import BY_LABEL
from tests.contract.user_code.rows import ROWS as USER_CODE

OPERATORS = "deepspeed_operators"
"""The fixture of tests that need DeepSpeed's compiled operators, and the marker of parameters that need them."""

SLOW = (
    "tests/contract/test_fsdp_options.py",
    "tests/contract/test_host_syncs.py",
    "tests/contract/test_mistakes.py::test_old_name_of_lightning",
    "tests/contract/test_mistakes.py::test_uncaught_error",
    "tests/contract/test_order.py",
    "tests/contract/test_own_strategy.py",
    "tests/distributed/averaging/",
    "tests/distributed/callbacks/",
    "tests/distributed/checkpoint/test_commands.py",
    "tests/distributed/checkpoint/test_consolidate.py",
    "tests/distributed/checkpoint/test_damage.py",
    "tests/distributed/checkpoint/test_foreign.py",
    "tests/distributed/checkpoint/test_kill.py",
    "tests/distributed/checkpoint/test_load_from_checkpoint.py::test_pytorch_lightning",
    "tests/distributed/checkpoint/test_replaced.py",
    "tests/distributed/checkpoint/test_survivors.py",
    "tests/distributed/ddp/test_ddp.py::test_failure_of_one_rank",
    "tests/distributed/diagnostics/test_doctor.py",
    "tests/distributed/diagnostics/test_bench.py",
    "tests/distributed/diagnostics/test_bench_ranks.py",
    "tests/distributed/dp/test_dp.py::test_example",
    "tests/distributed/examples/",
    "tests/distributed/faults/",
    "tests/distributed/fsdp/test_draws.py",
    "tests/distributed/fsdp/test_writes.py",
    "tests/distributed/hangs/",
    "tests/distributed/hugging_face/",
    "tests/distributed/launch/",
    "tests/distributed/model/test_unfreezing.py",
    "tests/distributed/user_code/test_after_fit.py::test_ranks_save_together",
    "tests/docs/",
    "tests/gpu/",
    "tests/unit/checkpoint/io/test_atomic.py::test_draft_is",
    "tests/unit/checkpoint/test_fuzz.py",
    "tests/unit/cli/test_commands.py::test_checkpoint_with_a_type",
    "tests/unit/test_import.py",
    "tests/unit/test_tested_versions.py",
)
"""Prefixes of the IDs of tests that the fast lane leaves out because they take long. Measure before adding one."""

ONE_SET = (
    "tests/contract/test_fsdp_options.py",
    "tests/contract/test_mistakes.py",
    "tests/contract/test_own_strategy.py",
    "tests/contract/test_sampling.py",
    "tests/contract/test_timeout.py",
    "tests/distributed/checkpoint/test_commands.py",
    "tests/distributed/checkpoint/test_consolidate.py",
    "tests/distributed/checkpoint/test_damage.py",
    "tests/distributed/checkpoint/test_kill.py",
    "tests/distributed/checkpoint/test_matrix.py",
    "tests/distributed/checkpoint/test_replaced.py",
    "tests/distributed/checkpoint/test_survivors.py",
    "tests/distributed/zero/test_compiling.py",
    "tests/distributed/zero/test_nvme.py",
    "tests/distributed/zero/test_nvme.py::test_two_runs",
    "tests/gpu/test_programs.py::test_benchmarks",
    "tests/gpu/test_programs.py::test_bisection",
    "tests/gpu/test_programs.py::test_failing",
    "tests/unit/checkpoint/io/test_atomic.py",
    "tests/unit/checkpoint/test_fuzz.py",
    "tests/unit/cli/",
    "tests/unit/diagnostics/",
    "tests/unit/planning/test_plan.py::test_70_billion",
    "tests/unit/test_documents.py",
    "tests/unit/test_import.py",
    "tests/unit/test_layers.py",
    "tests/unit/test_tested_versions.py",
)
"""Prefixes of the IDs of tests that CI runs on the newest versions only.

They are about signals, files, options, commands and our own source, which hardly depend on the versions of libraries.
"""

_ZERO_IN_ID = re.compile(r"zero[123]")
_ZERO_IN_PATH = re.compile(r"/zero/|deepspeed|test_zero")


def needs_operators(item: pytest.Item) -> bool:
    """Return whether the test waits until DeepSpeed's operators are compiled."""
    return OPERATORS in getattr(item, "fixturenames", ()) or item.get_closest_marker(OPERATORS) is not None


def needs_deepspeed(item: pytest.Item) -> bool:
    """Return whether the test trains with DeepSpeed, judged by its fixtures, folder and parameters."""
    callspec = getattr(item, "callspec", None)
    return (
        needs_operators(item)
        or _ZERO_IN_PATH.search(item.nodeid.partition("::")[0]) is not None
        or (callspec is not None and (_ZERO_IN_ID.search(callspec.id) is not None or _has_zero(callspec.params)))
    )


_TABLES = ("tests/contract/test_user_code.py", "tests/contract/test_lightning_api.py")
_COLUMN = "paral_ddp"
_THEMES = ("buffers", "gradients", "logs", "optimizers", "saving")
"""The part of the tables that the fast lane runs: this column, and of user code the rows of these themes."""


def is_slow(item: pytest.Item) -> bool:
    """Return whether the fast lane leaves the test out."""
    if item.nodeid.startswith(SLOW):
        return True
    callspec = getattr(item, "callspec", None)
    if callspec is None or not item.nodeid.startswith(_TABLES):
        return False
    row = USER_CODE.get(callspec.params.get("row"))
    return callspec.params.get("column", _COLUMN) != _COLUMN or (row is not None and row.theme not in _THEMES)


def needs_one_set(item: pytest.Item) -> bool:
    """Return whether CI runs the test on the newest versions only."""
    return item.nodeid.startswith(ONE_SET)


def _has_zero(parameters: dict[str, Any]) -> bool:
    return any(_is_zero(value) for value in _flat(parameters))


def _is_zero(value: Any) -> bool:
    if isinstance(value, str) and value in BY_LABEL:
        return BY_LABEL[value].needs_deepspeed
    return isinstance(value, ParalZeROStrategy) or value is ParalZeROStrategy


def _flat(parameters: dict[str, Any]) -> Iterable[Any]:
    for value in parameters.values():
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
