"""All ranks stop after the same batch and save, and a resumed fit is the same run."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_paral import ConfigurationError, Preemption
from lightning_paral.callbacks import preemption as preemption_module
from lightning_paral.checkpoint.load import verify
from tests.contract.cases import strategy_of
from tests.running import quiet_trainer

SEEN = list[tuple[str, int, int, float]]


class Noisy(LightningModule):
    """Draws random numbers in each step, and records its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.seen: SEEN = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).pow(2).mean()
        self.seen.append(("train", self.trainer.current_epoch, batch_idx, loss.item()))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(("val", self.trainer.current_epoch, batch_idx, self.layers(batch).pow(2).mean().item()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Manual(Noisy):
    """Steps its optimizer itself, after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Drawn(Dataset[Tensor]):
    """Samples that draw from the global generator."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(4.0) / 4 + index / 24 + 0.1 * torch.rand(4)


class SignalAt(Callback):
    """Sends a signal to this process in a hook of a training or validation batch; with no rank, to all processes."""

    def __init__(self, hook: str, epoch: int = 0, batch_idx: int = 0, rank: int | None = 1) -> None:
        self.at, self.rank, self.signum = (hook, epoch, batch_idx), rank, signal.SIGUSR1

    def send(self, trainer: Trainer, hook: str, batch_idx: int = 0) -> None:
        if (hook, trainer.current_epoch, batch_idx) == self.at and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.signum)
            if trainer.world_size > 1:
                time.sleep(1.2)  # the other rank runs ahead as far as the collectives let it

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.send(trainer, "batch", batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, _: int = 0
    ) -> None:
        self.send(trainer, "sanity" if trainer.sanity_checking else "val", batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.send(trainer, "epoch_end")


def run(
    folder: str,
    strategy: str = "paral_ddp",
    devices: int = 2,
    signal_at: SignalAt | None = None,
    resume: str | None = None,
    make: Callable[[], Noisy] = Noisy,
    **options: Any,
) -> tuple[Preemption, SEEN]:
    torch.manual_seed(0)
    preemption = Preemption(dirpath=folder, exit_status="return")
    callbacks = [preemption, *([] if signal_at is None else [signal_at])]
    module = make()
    defaults = {"max_epochs": 2, "val_check_interval": 0.5, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(
        devices=devices, strategy=strategy_of(strategy), callbacks=callbacks, **(defaults | options)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption_module, "_MOST_BATCHES", 3)  # the fit has few batches, which are fast
        trainer.fit(module, DataLoader(Drawn(24), 2, shuffle=True), DataLoader(Drawn(8), 2), ckpt_path=resume)
    return preemption, module.seen


def preempt_and_resume(folder: str, **options: Any) -> tuple[str | None, SEEN, SEEN, SEEN]:
    """Return where a fit was saved, what it did before and after, and what an uninterrupted fit does."""
    given = {name: options.pop(name) for name in ("signal_at",)}
    preemption, before = run(folder, **given, **options)
    _, after = run(folder, resume=preemption.checkpoint_path, **options) if preemption.was_preempted else (None, [])
    _, expected = run(folder, **options)
    return preemption.checkpoint_path, before, after, expected


def check(found: list[tuple[str | None, SEEN, SEEN, SEEN]]) -> None:
    for path, before, after, expected in found:
        assert path is not None
        assert verify(path) == []
        joined = [seen for seen in before + after if seen[0] == "train"]
        assert joined == [seen for seen in expected if seen[0] == "train"]
    assert len({path for path, *_ in found}) == 1
    assert len({len(before) for _, before, *_ in found}) == 1


WINDOW = {"signal_at": SignalAt("batch", 0, 1), "accumulate_grad_batches": 3}
TIMES = (
    SignalAt("sanity", rank=0),
    SignalAt("batch", 0, 0, rank=None),
    SignalAt("val", 0, 1),
    SignalAt("epoch_end", 0),
)


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(WINDOW | {"strategy": each}, id=each) for each in ("paral_fsdp", "paral_zero2", "paral_auto")),
        pytest.param({"signal_at": SignalAt("batch", 0, 3), "make": Manual}, id="manual optimization"),
        *(pytest.param({"signal_at": each}, id=f"{each.at}-{each.rank}") for each in TIMES),
    ],
)
def test_all_ranks_stop_after_the_same_batch_and_resume(on_ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    check(on_ranks(2, partial(preempt_and_resume, str(tmp_path), **options)))


def test_fit_that_is_at_its_end_ends_as_usual(on_ranks, tmp_path: Path) -> None:
    for preemption, seen in on_ranks(2, partial(run, str(tmp_path), signal_at=SignalAt("epoch_end", 1))):
        assert (preemption.was_preempted, len(seen)) == (False, 12 + 1 + 8)
    assert not list(tmp_path.iterdir())


def test_replicas_in_one_process(tmp_path: Path) -> None:
    preemption, _ = run(str(tmp_path), "paral_dp", accelerator="cpu", signal_at=SignalAt("batch", 0, 3, rank=0))

    assert verify(str(preemption.checkpoint_path)) == []


def test_handlers_of_the_user_are_called_and_restored(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, handler := lambda signum, frame: calls.append(signum))
    try:
        check([preempt_and_resume(str(tmp_path), devices=1, signal_at=SignalAt("batch", 0, 3, rank=0))])
        assert calls == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_deadline(tmp_path: Path) -> None:
    preemption = Preemption(tmp_path, timedelta(seconds=1.2), margin=0.2, exit_status="return")
    trainer = quiet_trainer(devices=1, strategy="paral_ddp", max_epochs=-1, callbacks=[preemption])
    trainer.fit(Noisy(), DataLoader(torch.randn(8, 4)))

    assert preemption.was_preempted
    assert verify(str(preemption.checkpoint_path)) == []


class Signaled(Noisy):
    """Gets SIGTERM `times` times in its first batch, with pauses of `pause` seconds."""

    def __init__(self, times: int = 1, pause: float = 0.0) -> None:
        super().__init__()
        self.times, self.pause = times, pause

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(self.pause)
        assert not self.pause, "no signal ended the process"
        return super().training_step(batch, batch_idx)


def status_of_child(train: Callable[[], object]) -> int:
    """Return the exit status of a forked process that calls `train`."""
    child = os.fork()
    if child == 0:
        try:
            train()
        except SystemExit as error:
            os._exit(int(error.code or 0))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fit_alone(module: LightningModule, **options: Any) -> None:
    trainer = quiet_trainer(devices=1, strategy="paral_ddp", max_epochs=1, callbacks=[Preemption(**options)])
    trainer.fit(module, DataLoader(torch.randn(8, 4)))


def test_process_exits_with_the_status_of_the_signal_or_of_the_option(tmp_path: Path) -> None:
    assert status_of_child(lambda: fit_alone(Signaled(), dirpath=tmp_path)) == 143
    assert status_of_child(lambda: fit_alone(Signaled(), dirpath=tmp_path, exit_status=85)) == 85


def test_second_signal_ends_the_process_without_a_checkpoint(tmp_path: Path) -> None:
    assert status_of_child(lambda: fit_alone(Signaled(2, pause=4.0), dirpath=tmp_path)) == 143
    assert not list(tmp_path.iterdir())


def test_evaluation_ends_at_once(tmp_path: Path) -> None:
    class Evaluated(Noisy):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def validate() -> None:
        trainer = quiet_trainer(devices=1, strategy="paral_ddp", callbacks=[Preemption(tmp_path)])
        trainer.validate(Evaluated(), DataLoader(torch.randn(8, 4)), verbose=False)

    assert status_of_child(validate) == -signal.SIGTERM


def test_options_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="margin"):
        Preemption(margin=-1.0)
