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


def test_checks_that_have_not_arrived_are_found_later(monkeypatch) -> None:
    pending = checks(True)
    assert pending.first_failed(wait=False) is None
    pending.add(torch.tensor(True), "later")
    pending.add(torch.tensor(False), "much later")

    assert pending.first_failed(wait=False) is None
    monkeypatch.setattr(Arriving, "has_arrived", True)
    assert pending.first_failed(wait=False) == "much later"
    assert pending.first_failed(wait=False) is None
