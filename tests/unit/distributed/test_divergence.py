"""Ranks that end epochs at the same time, in any order of their calls of the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_paral.distributed import divergence
from lightning_paral.distributed.divergence import EpochAgreement

RANKS, EPOCHS = 4, 60


def test_ranks_with_equal_steps_end_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "check_same", lambda *_: None)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def end_epochs(rank: int) -> int:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        watcher: Any = SimpleNamespace(rank=rank, world_size=RANKS, main_store=store)
        steps = EpochAgreement(watcher, timedelta(seconds=30), lambda: 0)
        for epoch in range(EPOCHS):
            steps.end_epoch(epoch)
        return epoch

    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(end_epochs, range(RANKS))) == [EPOCHS - 1] * RANKS
