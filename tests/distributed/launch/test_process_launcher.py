"""Ranks that are forked, as in a notebook: weights, metrics and errors come back. pytest forks as well."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ConfigurationError
from lightning_paral.errors import RankFailedError
from lightning_paral.strategies.process_launcher import ProcessLauncher
from tests.contract.cases import strategy_of
from tests.launching import outputs
from tests.models.regression import FEATURES, Regression
from tests.running import quiet_trainer


class Evaluated(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", nn.functional.l1_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class Adds(Evaluated):
    """Has a layer that is created in a hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.added: nn.Module | None = None

    def add(self, hook: str) -> None:
        if hook == self.hook and self.added is None:
            self.added = nn.Linear(2, 2)

    def configure_model(self) -> None:
        self.add("configure_model")

    def setup(self, stage: str) -> None:
        self.add("setup")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.added(super().forward(inputs)) if self.added is not None else super().forward(inputs)


class Fails(Regression):
    """A rank fails in its second step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        match batch_idx, self.global_rank, self.how:
            case 1, 1, "raise":
                raise KeyError("my mistake")
            case 1, 1, "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case 1, 1, "sys.exit":
                sys.exit(0)
            case 1, 0, "os._exit":
                os._exit(0)
            case 1, _, "all sys.exit":
                sys.exit(3)


def ranks_left(trainer: Trainer) -> list[str]:
    launcher = trainer.strategy.launcher
    assert isinstance(launcher, ProcessLauncher)
    return [process.name for process in launcher.procs if process.is_alive()]


def loader(num_samples: int = 24) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, FEATURES, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2].sin()), batch_size=6)


def trained(strategy: Any, model: Evaluated, folder: Path, devices: int) -> tuple[Trainer, list[Any]]:
    """Fit, predict and validate."""
    torch.manual_seed(0)
    best = ModelCheckpoint(folder, monitor="error")
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=2, callbacks=[best], enable_checkpointing=True
    )
    trainer.fit(model, loader(), loader())
    assert model.trainer is trainer
    return trainer, [trainer.predict(model, loader()), trainer.validate(model, loader(), ckpt_path="best")]


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3"])
def test_forked_ranks_leave_the_weights_and_metrics_that_one_process_has(label: str, tmp_path: Path) -> None:
    models = [Evaluated(), Evaluated()]
    models[1].load_state_dict(models[0].state_dict())

    alone, returned = trained("auto", models[0], tmp_path / "alone", 1)
    forked, forked_returned = trained(strategy_of(label, split="global"), models[1], tmp_path / "forked", 2)

    assert not ranks_left(forked)
    assert "LOCAL_RANK" not in os.environ
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(forked_returned[0], returned[0][::2], rtol=1e-4, atol=1e-5)  # rank 0's, as in a script
    assert forked_returned[1][0]["error"] == pytest.approx(returned[1][0]["error"], rel=1e-4)
    assert forked.callback_metrics["error"].item() == pytest.approx(alone.callback_metrics["error"].item(), rel=1e-4)
    best, alone_best = forked.checkpoint_callback, alone.checkpoint_callback
    assert isinstance(best, ModelCheckpoint)
    assert isinstance(alone_best, ModelCheckpoint)
    assert Path(best.best_model_path).name == Path(alone_best.best_model_path).name
    with pytest.raises(ConfigurationError, match="state of their optimizers"):
        forked.save_checkpoint(tmp_path / "after.ckpt")
    forked.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(ConfigurationError, match="has fitted in ranks that have ended"):
        forked.fit(models[1], loader())


def test_layers_of_configure_model_come_back() -> None:
    model = Adds("configure_model")
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1)
    trainer.fit(model, loader(), loader())
    (validated,) = trainer.validate(model, loader())
    error = sum(nn.functional.l1_loss(model(inputs), targets) for inputs, targets in loader()) / 4
    assert validated["error"] == pytest.approx(float(error), rel=1e-5)


def test_layers_of_other_hooks_are_an_error() -> None:
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "added.weight", "added.bias"'):
        trainer.fit(Adds("setup"), loader())


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", ProcessRaisedException, r'(?s)Rank 1 raised an error:.*raise KeyError\("my mistake"\)'),
        ("kill", RankFailedError, r"Rank 1 died without an error: its process was killed by SIGKILL"),
        ("sys.exit", (RankFailedError, ProcessRaisedException), r"Rank 1 died .* status 1|SystemExit"),
        ("all sys.exit", SystemExit, "3"),
        ("os._exit", (RankFailedError, ProcessRaisedException), r"Rank 0|rank 0"),
    ],
)
def test_first_error_of_a_forked_rank_is_raised_and_no_process_is_left(
    how: str, error: Any, message: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    save = OnExceptionCheckpoint(tmp_path)  # the ranks call it: this process has nothing to save
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1, callbacks=[save], enable_checkpointing=True)

    with pytest.raises(error, match=message):
        trainer.fit(Fails(how), loader())

    assert time.monotonic() - began < 30
    assert not ranks_left(trainer)
    for path in tmp_path.glob("*.ckpt"):
        assert torch.load(path, weights_only=False)["global_step"] == 1
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1)
    trainer.fit(Regression(), loader())


IMPORTS = """
import os, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import lightning_paral
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
for strategy in ("paral_ddp", "paral_fsdp"): before = model.out.weight.sum(); trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1); trainer.fit(model, data); print("fitted", bool(model.out.weight.sum() != before), trainer.validate(model, data))

"""  # noqa: E501  an interactive session needs it in one line


@pytest.mark.parametrize("how", ["interactive", "command", "stdin"])
def test_session_that_cannot_run_again_forks_although_it_has_used_threads(launch: Any, how: str) -> None:
    arguments = {"interactive": ["-i"], "command": ["-c", CELLS], "stdin": []}[how]
    process = launch(*arguments, OMP_NUM_THREADS="2")
    (printed,) = outputs(process, stdin="" if how == "command" else CELLS)

    assert process.returncode == 0, printed
    assert printed.count("fitted True [{}]\n") == 2, printed


ENDLESS = f"""{IMPORTS}
class Endless(Regression):
    def on_train_start(self):
        os.write(1, f"rank {{os.getpid()}}\\n".encode())  # at once: unbuffered, `print` writes each word
        time.sleep(1000)

quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1).fit(Endless(), data)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children together with their parent")
def test_forked_ranks_end_with_the_process_that_started_them(launch: Any) -> None:
    process = launch("-c", ENDLESS)
    told = (line.split() for line in process.stdout if line.startswith("rank "))
    ranks = [psutil.Process(int(next(told)[1])) for _ in range(2)]
    process.kill()
    process.wait()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
