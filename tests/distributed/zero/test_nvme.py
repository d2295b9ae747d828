"""Offload to NVMe: each run has its own files, which are removed with the run, and weights are read back before."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import Offload, ParalZeROStrategy
from lightning_paral.errors import ConfigurationError
from tests.models.regression import FEATURES, Regression, regression_data
from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, Resumable, fit, mean_losses
from tests.running import quiet_trainer

WIDTH = 1024  # DeepSpeed offloads a shard to a file only from a megabyte


class BuiltOnDisk(Regression):
    """Has weights large enough for files, built partitioned in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.hidden, self.out

    def configure_model(self) -> None:
        if hasattr(self, "hidden"):
            return
        self.hidden = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def on_nvme(folder: str) -> ParalZeROStrategy:
    offload = Offload("nvme", path=folder, buffer_numel=WIDTH**2, max_in_cpu_numel=1)
    return ParalZeROStrategy(stage=3, offload_optimizer=offload, offload_parameters=offload)


def fit_twice(num_ranks: int, strategy: Any) -> BuiltOnDisk:
    torch.manual_seed(3)
    model = BuiltOnDisk()
    for _ in range(2):
        trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy())
        trainer.fit(model, regression_data(4, num_ranks))
    return model


def fit_twice_on_nvme(folder: str) -> tuple[list[float], list[str]]:
    """Return the losses and the names that are left in `folder`."""
    losses = fit_twice(2, lambda: on_nvme(folder)).losses
    torch.distributed.barrier()  # wait until the other rank has removed its files
    return losses, [file.name for file in Path(folder).iterdir()]


@pytest.mark.deepspeed_operators
def test_weights_on_nvme_are_read_back_for_a_second_fit(on_ranks, tmp_path: Path) -> None:
    expected = fit_twice(1, lambda: "auto").losses

    ranks = on_ranks(2, fit_twice_on_nvme, str(tmp_path))

    losses = torch.tensor([losses for losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=0.0)
    assert [left for _, left in ranks] == [[], []]


ONE_WITHOUT_ROOM = """
import sys, torch, warnings
from pathlib import Path
from lightning_paral.errors import CheckpointError
from lightning_paral.model import host_memory_check
from tests.distributed.zero.test_nvme import BuiltOnDisk, on_nvme
from tests.models.regression import regression_data
from tests.running import quiet_trainer
torch.set_num_threads(1)
host_memory_check.available_bytes = lambda: 0
folder, path = map(Path, sys.argv[1:])
torch.manual_seed(3)
module, trainer = BuiltOnDisk(), quiet_trainer(max_epochs=1, devices=1, strategy=on_nvme(str(folder)))
module.on_train_end = lambda: trainer.save_checkpoint(path, weights_only=True)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    trainer.fit(module, regression_data(4, 1))
assert any("Its weights will be in checkpoints only" in str(each.message) for each in warned)
assert list(folder.iterdir()) == []
try:
    trainer.save_checkpoint(path.with_name("late.ckpt"), weights_only=True)
except CheckpointError as error:
    assert "were on NVMe, and were removed when the run ended" in str(error), error
else:
    raise AssertionError("saved what was lost")
"""


@pytest.mark.deepspeed_operators
def test_weights_on_nvme_without_room_in_memory_are_saved_in_the_fit_only(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = BuiltOnDisk()
    quiet_trainer(max_epochs=1, devices=1).fit(expected, regression_data(4, 1))
    (tmp_path / "disk").mkdir()

    paths = [str(tmp_path / "disk"), str(tmp_path / "x.ckpt")]
    subprocess.run([sys.executable, "-c", ONE_WITHOUT_ROOM, *paths], check=True, timeout=300)

    saved = BuiltOnDisk.load_from_checkpoint(tmp_path / "x.ckpt")
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=0.0, atol=1e-5)


# Checkpoints


class ResumableOnDisk(Resumable):
    """Has two parameter groups large enough for files, with alternating parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(self.first.in_features, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.frozen = nn.LayerNorm(WIDTH).requires_grad_(False)  # small enough to stay in memory
        self.second, self.tied = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def configure_optimizers(self) -> Any:
        here = [self.second.weight, self.tied.bias, self.first.weight, self.scale]
        there = [self.tied.weight, self.second.bias, self.first.bias, *self.out.parameters()]
        return torch.optim.AdamW([{"params": here}, {"params": there, "weight_decay": 0.3}], lr=1e-4)


def save_from_nvme(folder: str) -> dict[int, float]:
    torch.manual_seed(3)
    return fit(on_nvme(folder), 2, save_to=f"{folder}/x.ckpt", module=ResumableOnDisk).losses


def resume(folder: str, where: str) -> dict[int, float]:
    strategy = on_nvme(folder) if where == "on NVMe" else where
    return fit(strategy, 2, resume_from=f"{folder}/x.ckpt", module=ResumableOnDisk).losses


@pytest.mark.deepspeed_operators
def test_checkpoint_of_weights_on_nvme_resumes_there_and_in_memory(on_ranks, tmp_path: Path) -> None:
    expected = mean_losses(on_ranks(2, save_from_nvme, str(tmp_path), timeout=300))
    for where in ("on NVMe", "paral_ddp"):
        found = mean_losses(on_ranks(2, resume, str(tmp_path), where, timeout=300))
        assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
        assert found == pytest.approx({number: expected[number] for number in found}, rel=1e-4)


# Two runs


ONE_OF_TWO = """
import sys, torch
from tests.distributed.zero.test_nvme import fit_twice, on_nvme
torch.set_num_threads(1)
print("losses", *fit_twice(1, lambda: on_nvme(sys.argv[1])).losses)
"""


def losses_of(process: "subprocess.Popen[str]") -> Tensor:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (line,) = [line for line in out.splitlines() if line.startswith("losses")]
    return torch.tensor([float(loss) for loss in line.split()[1:]])


@pytest.mark.deepspeed_operators
def test_two_runs_in_one_folder_do_not_interfere(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        losses = [losses_of(run) for run in runs]
    finally:
        for run in runs:
            run.kill()
    expected = torch.tensor(fit_twice(1, lambda: "auto").losses)
    for seen in losses:
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=0.0)
    assert list(tmp_path.iterdir()) == []


LEFT_BY_A_KILLED_RANK = """
import sys
from contextlib import ExitStack
from lightning_paral import Offload
from lightning_paral.engines.zero.offload import make_folders
from lightning_paral.engines.zero.options import ZeROOptions

options = ZeROOptions(stage=3, offload_optimizer=Offload("nvme", path=sys.argv[1]))
with ExitStack() as undo:
    (folder,) = make_folders(options, "first", 0, undo).values()
    folder.with_name("rank1").mkdir()
assert not folder.exists() and folder.with_name("rank1").exists()
"""


def test_files_of_a_killed_rank_are_removed_when_another_exits(tmp_path: Path) -> None:
    (tmp_path / "paral_zero_second").mkdir()
    subprocess.run([sys.executable, "-c", LEFT_BY_A_KILLED_RANK, str(tmp_path)], check=True, timeout=120)
    assert [folder.name for folder in tmp_path.iterdir()] == ["paral_zero_second"]


@pytest.mark.deepspeed_operators
@pytest.mark.parametrize(
    ("frozen", "message"), [(False, r"hidden\.weight has 160000 elements"), (True, r"hidden\.weight is frozen")]
)
def test_what_nvme_cannot_store_is_named_before_the_run(tmp_path: Path, frozen: bool, message: str) -> None:
    offload = Offload("nvme", path=tmp_path, buffer_numel=10_000)
    trainer = quiet_trainer(devices=1, strategy=ParalZeROStrategy(stage=3, offload_parameters=offload))
    module = Regression()
    module.hidden = nn.Linear(FEATURES, 20_000).requires_grad_(not frozen)
    module.out = nn.Linear(20_000, 2)

    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(module, regression_data(1, 1))
