"""After a fit that failed and whose error was caught, SIGTERM is handled as before the fit."""

import signal
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral import Preemption
from lightning_paral.errors import RankFailedError
from tests.contract.cases import strategy_of
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class FailsIn(Regression):
    """Rank 1 fails in the hook of this name."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _fail(self, hook: str) -> None:
        if hook == self.hook and self.global_rank == 1:
            raise KeyError("my mistake")

    def setup(self, stage: str) -> None:
        self._fail("setup")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self._fail("training_step")
        return super().training_step(batch, batch_idx)


def _own_handler(signum: int, frame: Any) -> None:
    pass


def handler_after_failure(hook: str, is_preemptible: bool, before: Any) -> tuple[str, bool]:
    signal.signal(signal.SIGTERM, before)
    model: LightningModule = FailsIn(hook)
    callbacks: list[Any] = [Preemption()] if is_preemptible else []
    trainer = quiet_trainer(strategy=strategy_of("paral_ddp"), devices=2, max_epochs=1, callbacks=callbacks)
    try:
        trainer.fit(model, regression_data(2, 2))
    except (KeyError, RankFailedError) as error:
        return type(error).__name__, signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return "", False


@pytest.mark.parametrize("before", [_own_handler, signal.SIG_DFL])
@pytest.mark.parametrize("is_preemptible", [False, True])
@pytest.mark.parametrize("hook", ["setup", "training_step"])
def test_handler_of_sigterm_is_restored(in_own_world, hook: str, is_preemptible: bool, before: Any) -> None:
    results = in_own_world(2, handler_after_failure, hook, is_preemptible, before)

    assert [restored for _, restored in results] == [True, True]
    assert {name for name, _ in results} == {"KeyError", "RankFailedError"}
