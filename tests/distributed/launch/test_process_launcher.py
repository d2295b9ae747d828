"""Ranks that are forked or spawned, as in a notebook: state, results and errors come back. pytest forks as well."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_paral import ConfigurationError, ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.errors import RankFailedError
from lightning_paral.strategies.process_launcher import ProcessLauncher
from tests.launching import outputs
from tests.models.regression import FEATURES, Regression
from tests.running import quiet_trainer

STRATEGIES = {
    "ddp": lambda **options: ParalDDPStrategy(split="global", **options),
    "fsdp": lambda **options: ParalFSDPStrategy(split="global", **options),
    "zero3": lambda **options: ParalZeROStrategy(stage=3, split="global", **options),
}


class Notes(Callback):
    """Keeps the losses, as users of notebooks do, and what Trainer tells it about errors."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.errors: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.errors.append(str(exception))


class Evaluated(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.mean_loss = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean_loss.update(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", nn.functional.l1_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class Fails(Regression):
    """Rank 1 fails in its second step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                sys.exit(0)
            raise KeyError("my mistake")


def ranks_left() -> list[str]:
    """Return the names of processes of ranks. Other tests of this process may have left a pool of ranks."""
    return [process.name for process in multiprocessing.active_children() if process.name.startswith("rank ")]


def loader(num_samples: int = 24) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, FEATURES, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2].sin()), batch_size=6)


def trained(strategy: Any, model: Evaluated, folder: Path, devices: int) -> tuple[Trainer, Notes, list[Any]]:
    """Fit, predict and validate."""
    torch.manual_seed(0)
    notes, best = Notes(), ModelCheckpoint(folder, monitor="error")
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=2, callbacks=[notes, best], enable_checkpointing=True
    )
    trainer.fit(model, loader(), loader())
    predicted = trainer.predict(model, loader())
    return trainer, notes, [predicted, trainer.validate(model, loader()), torch.rand(1).item()]


@pytest.mark.parametrize("label", STRATEGIES)
def test_forked_ranks_leave_the_state_that_one_process_has(label: str, tmp_path: Path) -> None:
    models = [Evaluated(), Evaluated()]
    models[1].load_state_dict(models[0].state_dict())

    alone, notes, returned = trained("auto", models[0], tmp_path / "alone", 1)
    forked, forked_notes, forked_returned = trained(STRATEGIES[label](), models[1], tmp_path / "forked", 2)

    assert isinstance(forked.strategy.launcher, ProcessLauncher)
    assert not ranks_left()
    assert "LOCAL_RANK" not in os.environ
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert (forked.global_step, forked.current_epoch) == (alone.global_step, alone.current_epoch) == (8, 2)
    assert len(forked_notes.losses) == len(notes.losses) == len(models[1].losses) == 8
    assert models[1].trainer is forked
    assert [len(part) for part in forked_returned[0]] == [3, 3, 3, 3]  # rank 0's half of each batch, as in a script
    torch.testing.assert_close(forked_returned[0][0], returned[0][0][::2], rtol=1e-4, atol=1e-5)
    assert forked_returned[1][0]["error"] == pytest.approx(returned[1][0]["error"], rel=1e-4)
    assert forked_returned[2] == returned[2]  # the generator continues
    assert forked.callback_metrics["error"].item() == pytest.approx(alone.callback_metrics["error"].item(), rel=1e-4)
    best, alone_best = forked.checkpoint_callback, alone.checkpoint_callback
    assert isinstance(best, ModelCheckpoint)
    assert isinstance(alone_best, ModelCheckpoint)
    assert Path(best.best_model_path).name == Path(alone_best.best_model_path).name
    assert Path(best.best_model_path).exists()
    with pytest.raises(ConfigurationError, match="state of their optimizers"):
        forked.save_checkpoint(tmp_path / "after.ckpt")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [("raise", KeyError, "my mistake"), ("kill", RankFailedError, "Rank 1 died.*SIGKILL"), ("exit", SystemExit, "1")],
)
def test_first_error_of_a_forked_rank_is_raised_and_no_process_is_left(how: str, error: Any, message: str) -> None:
    notes, save = Notes(), ModelCheckpoint(save_on_exception=True)
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1, callbacks=[notes])
    vars(trainer)["callbacks"].append(save)

    with pytest.raises(error, match=message) as caught:
        trainer.fit(Fails(how), loader())

    assert not ranks_left()
    if how == "raise":
        (note,) = caught.value.__notes__
        assert note.startswith("It was raised on rank 1:")
        assert 'raise KeyError("my mistake")' in note
        assert "lightning/pytorch" not in note
    assert notes.errors == []  # only the ranks call the callbacks: this process has nothing to save
    assert "on_exception" not in vars(notes)
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1)
    trainer.fit(Regression(), loader())
    assert trainer.global_step == 2  # of 4 batches, each rank draws 2


@pytest.mark.lane("default")
def test_spawned_ranks_train_and_send_the_weights_back() -> None:
    results = []
    for method in ("fork", "spawn"):
        torch.manual_seed(0)
        model = Evaluated()
        trainer = quiet_trainer(strategy=STRATEGIES["ddp"](start_method=method), devices=2, max_epochs=1)
        trainer.fit(model, loader())
        results.append((model.out.weight, model.losses, torch.rand(1)))

    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_objects_that_cannot_be_sent_to_spawned_ranks_are_refused() -> None:
    class Local(Regression):
        pass

    trainer = quiet_trainer(strategy=ParalFSDPStrategy(start_method="spawn"), devices=2, max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"cannot be pickled.*Local.*start_method='fork'"):
        trainer.fit(Local(), loader())
    assert not ranks_left()


IMPORTS = """
import os, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from lightning_paral import ConfigurationError, ParalDDPStrategy
from tests.launching import outputs
from tests.models.regression import Regression
from tests.running import quiet_trainer

data = DataLoader(TensorDataset(torch.ones(8, 8), torch.ones(8, 2)), batch_size=2)
"""

OWN = f"""{IMPORTS}
torch.ones(1 << 22).sum()  # starts the threads of OpenMP, if there are several

class Own(Regression):
    validation_step = Regression.training_step

model = Own()
"""

CELLS = f"""{OWN}
for strategy in ("paral_ddp", "paral_fsdp"): trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1); trainer.fit(model, data); print("fitted", trainer.global_step, len(model.losses))

print("validated", trainer.validate(model, data))
"""  # noqa: E501  an interactive session needs it in one line


@pytest.mark.parametrize("how", ["interactive", "command", "stdin"])
def test_session_that_cannot_run_again_forks_although_it_has_used_threads(launch, how: str) -> None:
    arguments = {"interactive": ["-i"], "command": ["-c", CELLS], "stdin": []}[how]
    process = launch(*arguments, OMP_NUM_THREADS="2")
    (printed,) = outputs(process, stdin="" if how == "command" else CELLS)

    assert process.returncode == 0, printed
    assert "fitted 2 2\n" in printed, printed
    assert "fitted 2 4\n" in printed
    assert "validated [{}]\n" in printed
    assert printed.count("computes with one thread") == 2  # once per Trainer with forked ranks


ENDLESS = f"""{IMPORTS}
class Endless(Regression):
    def on_train_start(self):
        os.write(1, f"rank {{os.getpid()}}\\n".encode())  # at once: unbuffered, `print` writes each word
        time.sleep(1000)

quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1).fit(Endless(), data)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children together with their parent")
def test_forked_ranks_end_with_the_process_that_started_them(launch) -> None:
    process = launch("-c", ENDLESS)
    told = (line.split() for line in process.stdout if line.startswith("rank "))
    ranks = [int(next(told)[1]) for _ in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, ranks))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
