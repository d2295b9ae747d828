"""A run is watched so that it can be ended at any time, and its hooks are guarded after each failure."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_paral.strategies import run_watch
from lightning_paral.strategies.run_watch import RunWatch
from tests.models.resumable import Resumable
from tests.running import quiet_trainer


def test_what_watches_a_run_can_be_ended_before_it_can_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = SimpleNamespace(
        world_size=2, broadcast=lambda name: name, lightning_module=None, cluster_environment=None
    )
    watch = RunWatch(strategy, timedelta(seconds=60), "full")
    added: list[Any] = []
    watcher = SimpleNamespace(add=lambda topic: added.append(watch.watching and topic))
    monkeypatch.setattr(run_watch, "RankWatcher", lambda *_: watcher)
    monkeypatch.setattr(run_watch, "FailureWatch", lambda _: "failures")
    monkeypatch.setattr(run_watch, "Hangs", lambda *_, **__: "hangs")

    watch.begin()
    watch._undo.close()

    assert added == ["failures", "hangs"]


def test_hooks_are_guarded_also_after_the_failure_of_a_run_that_begins_before_another_one_has_ended() -> None:
    trainer, module = quiet_trainer(strategy="paral_ddp", devices=1), Resumable()
    strategy: Any = trainer.strategy
    strategy.connect(module)
    module.trainer = trainer
    for _ in range(2):
        strategy._watch.begin()
        assert "save_checkpoint" not in vars(trainer)
        strategy._watch.report_failure(ValueError("a bug"))
        assert "save_checkpoint" in vars(trainer)
    strategy._watch.end()
