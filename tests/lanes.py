"""Which tests need DeepSpeed, and which are slow: what `pytest -m "not deepspeed and not slow"` leaves out."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from lightning_paral import ParalZeROStrategy

OPERATORS = "deepspeed_operators"
"""The fixture of tests that need DeepSpeed's compiled operators, and the mark of parameters that do."""

SLOW = (
    "tests/contract/test_fsdp_options.py",
    "tests/contract/test_host_syncs.py",
    "tests/contract/test_mistakes.py::test_old_name_of_lightning",
    "tests/contract/test_mistakes.py::test_uncaught_error",
    "tests/contract/test_order.py",
    "tests/contract/test_own_strategy.py",
    "tests/distributed/averaging/",
    "tests/distributed/checkpoint/test_commands.py",
    "tests/distributed/checkpoint/test_consolidate.py",
    "tests/distributed/checkpoint/test_damage.py",
    "tests/distributed/checkpoint/test_foreign.py",
    "tests/distributed/checkpoint/test_kill.py",
    "tests/distributed/checkpoint/test_replaced.py",
    "tests/distributed/examples/",
    "tests/distributed/fsdp/test_writes.py",
    "tests/distributed/hugging_face/",
    "tests/distributed/launch/",
    "tests/distributed/model/test_unfreezing.py",
    "tests/docs/",
    "tests/gpu/",
    "tests/unit/checkpoint/test_fuzz.py",
    "tests/unit/test_import.py",
    "tests/unit/test_tested_versions.py",
)
"""Beginnings of the IDs of tests that the fast lane leaves out, besides those marked by hand: measured, not guessed."""

_ZERO_IN_ID = re.compile(r"zero[123]")
_ZERO_IN_PATH = re.compile(r"/zero/|deepspeed|test_zero")


def needs_operators(item: pytest.Item) -> bool:
    """Whether the test waits until DeepSpeed's operators are compiled."""
    return OPERATORS in getattr(item, "fixturenames", ()) or item.get_closest_marker(OPERATORS) is not None


def needs_deepspeed(item: pytest.Item) -> bool:
    """Whether the test trains by DeepSpeed: by its fixtures, its folder, or one of its parameters."""
    callspec = getattr(item, "callspec", None)
    return (
        needs_operators(item)
        or _ZERO_IN_PATH.search(item.nodeid.partition("::")[0]) is not None
        or (callspec is not None and (_ZERO_IN_ID.search(callspec.id) is not None or _has_zero(callspec.params)))
    )


_TABLES = ("tests/contract/test_user_code.py", "tests/contract/test_lightning_api.py")
"""One of their columns is quick, all of them are not."""


def is_slow(item: pytest.Item) -> bool:
    """Whether the fast lane leaves the test out."""
    return item.nodeid.startswith(SLOW) or (item.nodeid.startswith(_TABLES) and not item.nodeid.endswith("-paral_ddp]"))


def _has_zero(parameters: dict[str, Any]) -> bool:
    return any(isinstance(value, ParalZeROStrategy) or value is ParalZeROStrategy for value in _flat(parameters))


def _flat(parameters: dict[str, Any]) -> Iterable[Any]:
    for value in parameters.values():
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
