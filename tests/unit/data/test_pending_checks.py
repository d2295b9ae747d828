"""Checks whose results are on a device are read when they arrive, and the first that failed is named."""

import torch

from lightning_paral.data import pending_checks
from lightning_paral.data.async_scalar import AsyncScalar
from lightning_paral.data.pending_checks import PendingChecks


class Arriving(AsyncScalar):
    """A read that arrives when the test sets `has_arrived`."""

    has_arrived = False


def test_checks_that_have_not_arrived_are_found_later(monkeypatch) -> None:
    monkeypatch.setattr(pending_checks, "AsyncScalar", Arriving)
    monkeypatch.setattr(Arriving, "has_arrived", False)
    pending: PendingChecks[str] = PendingChecks()
    pending.add(torch.tensor(True), "first")
    assert pending.first_failed(wait=False) is None
    pending.add(torch.tensor(True), "later")
    pending.add(torch.tensor(False), "much later")

    assert pending.first_failed(wait=False) is None
    monkeypatch.setattr(Arriving, "has_arrived", True)
    assert pending.first_failed(wait=False) == "much later"
    assert pending.first_failed(wait=False) is None
