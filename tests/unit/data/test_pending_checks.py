"""Checks whose results are on a device are read when they arrive, and the first that failed is named."""

import pytest
import torch

from lightning_paral.data import pending_checks
from lightning_paral.data.async_scalar import AsyncScalar
from lightning_paral.data.pending_checks import PendingChecks


class Arriving(AsyncScalar):
    """A read that arrives when the test sets `has_arrived`."""

    has_arrived = False


@pytest.fixture(autouse=True)
def arrival(monkeypatch) -> None:
    monkeypatch.setattr(pending_checks, "AsyncScalar", Arriving)
    monkeypatch.setattr(Arriving, "has_arrived", False)


def checks(*results: bool) -> PendingChecks[str]:
    pending: PendingChecks[str] = PendingChecks()
    for i, result in enumerate(results):
        pending.add(torch.tensor(result), f"step {i}")
    return pending


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ((True, True), None),
        ((False, True), "step 0"),
        ((True, False), "step 1"),
        ((True, True, False, True, False), "step 2"),
    ],
)
def test_first_check_that_failed_is_found(results: tuple[bool, ...], expected: str | None) -> None:
    pending = checks(*results)

    assert pending.first_failed(wait=True) == expected
    assert pending.first_failed(wait=True) is None


def test_checks_that_have_not_arrived_are_found_later(monkeypatch) -> None:
    pending = checks(True)
    assert pending.first_failed(wait=False) is None
    pending.add(torch.tensor(True), "later")
    pending.add(torch.tensor(False), "much later")

    assert pending.first_failed(wait=False) is None
    monkeypatch.setattr(Arriving, "has_arrived", True)
    assert pending.first_failed(wait=False) == "much later"
    assert pending.first_failed(wait=False) is None
