"""Offload to NVMe: each run has its own files, which are removed with the run or with the weights in them."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import Offload, ParalZeROStrategy
from lightning_paral.errors import ConfigurationError
from tests.models.regression import FEATURES, Regression, regression_data
from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, Resumable, fit, mean_losses
from tests.running import quiet_trainer

pytestmark = pytest.mark.deepspeed_operators

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


def fit_twice_on_nvme(folder: str) -> tuple[list[float], list[int], list[str]]:
    """Return the losses, the bytes on disk after rank 0 and after rank 1 drops the model, and the remaining names."""
    model: BuiltOnDisk | None = fit_twice(2, lambda: on_nvme(folder))
    assert model is not None
    losses, num_bytes = model.losses, []
    for rank in range(2):
        torch.distributed.barrier()  # wait until the other rank has removed its files
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        assert not any("optimizer" in file.parts for file in files)
        num_bytes.append(sum(file.stat().st_size for file in files))
        torch.distributed.barrier()
        if rank == torch.distributed.get_rank():
            model = None
            gc.collect()
    torch.distributed.barrier()
    return losses, num_bytes, [file.name for file in Path(folder).iterdir()]


def test_weights_on_nvme_stay_for_a_second_fit_and_are_removed_with_the_model(on_ranks, tmp_path: Path) -> None:
    expected = fit_twice(1, lambda: "auto").losses

    ranks = on_ranks(2, fit_twice_on_nvme, str(tmp_path))

    losses = torch.tensor([losses for losses, _, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=0.0)
    for _, (both, second), left in ranks:
        assert both == 2 * second >= WIDTH**2 * 4
        assert left == []


class BuiltWhole(BuiltOnDisk):
    """Has the same weights, which are partitioned and moved to disk when the fit begins."""

    def __init__(self) -> None:
        super().__init__()
        BuiltOnDisk.configure_model(self)


def fit_built_whole(num_ranks: int, strategy: Any) -> BuiltOnDisk:
    torch.manual_seed(3)
    model = BuiltWhole()
    quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy).fit(model, regression_data(4, num_ranks))
    return model


def fit_built_whole_on_nvme(folder: str) -> tuple[list[float], set[torch.dtype]]:
    model = fit_built_whole(2, on_nvme(folder))
    return model.losses, {parameter.dtype for parameter in model.parameters()}


def test_weights_built_before_the_fit_are_offloaded_in_their_dtype(on_ranks, tmp_path: Path) -> None:
    expected = fit_built_whole(1, "auto").losses

    ranks = on_ranks(2, fit_built_whole_on_nvme, str(tmp_path))

    losses = torch.tensor([losses for losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=0.0)
    assert all(dtypes == {torch.float32} for _, dtypes in ranks)


# Checkpoints


class ResumableOnDisk(Resumable):
    """Has two parameter groups large enough for files, with alternating parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(self.first.in_features, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.frozen, self.second, self.tied = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(WIDTH, 3)

    def configure_optimizers(self) -> Any:
        here = [self.second.weight, self.tied.bias, self.first.weight, self.scale]
        there = [self.tied.weight, self.second.bias, self.first.bias, *self.out.parameters()]
        return torch.optim.AdamW([{"params": here}, {"params": there, "weight_decay": 0.3}], lr=1e-4)


class Counting(ParalZeROStrategy):
    """Records how often saves and loads read and write the weights and the optimizer state of a group."""

    def __init__(self, folder: str, form: Any) -> None:
        offload = Offload("nvme", path=folder, buffer_numel=WIDTH**2, max_in_cpu_numel=1)
        super().__init__(stage=3, offload_optimizer=offload, offload_parameters=offload, checkpoint=form)
        self.num_read: dict[str, int] = {}
        self.num_written: dict[str, int] = {}

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.counting("save"):
            super().save_checkpoint(*args, **kwargs)

    def optimizer_state(self, *args: Any) -> Any:
        with self.counting("save"):
            return super().optimizer_state(*args)

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self.counting("load"):
            super().load_model_state_dict(*args, **kwargs)

    def load_optimizer_state_dict(self, *args: Any) -> None:
        with self.counting("load"):
            super().load_optimizer_state_dict(*args)

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper as Swapper

        read, write = Swapper._swap_in_parameter, Swapper._swap_out_optimizer_state

        def reading(*args: Any, **kwargs: Any) -> None:
            self.num_read[what] = self.num_read.get(what, 0) + 1
            read(*args, **kwargs)

        def writing(*args: Any, **kwargs: Any) -> None:
            self.num_written[what] = self.num_written.get(what, 0) + 1
            write(*args, **kwargs)

        with (
            mock.patch.object(Swapper, "_swap_in_parameter", reading),
            mock.patch.object(Swapper, "_swap_out_optimizer_state", writing),
        ):
            yield


Losses = dict[int, float]


def save_from_nvme(folder: str, form: str) -> tuple[Losses, Any, Any]:
    torch.manual_seed(3)
    strategy = Counting(folder, form)
    module = fit(strategy, 2, save_to=f"{folder}/x.ckpt", module=ResumableOnDisk())
    return module.losses, strategy.num_read, strategy.num_written


def resume_on_nvme(folder: str, form: str) -> tuple[Losses, Any, Any]:
    strategy = Counting(folder, form)
    module = fit(strategy, 2, resume_from=f"{folder}/x.ckpt", module=ResumableOnDisk())
    return module.losses, strategy.num_read, strategy.num_written


def resume_in_memory(folder: str) -> Losses:
    losses: Losses = fit("paral_ddp", 2, resume_from=f"{folder}/x.ckpt", module=ResumableOnDisk()).losses
    return losses


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_checkpoints_read_each_group_on_nvme_once(on_ranks, tmp_path: Path, form: str) -> None:
    saved = on_ranks(2, save_from_nvme, str(tmp_path), form, timeout=300)
    resumed = on_ranks(2, resume_on_nvme, str(tmp_path), form, timeout=300)

    for _, num_read, num_written in saved:
        assert (num_read, num_written) == ({"save": 2}, {})
    for _, num_read, num_written in resumed:
        # Includes optimizer state. The module was built unpartitioned, so weights are restored before the offload.
        assert (num_read, num_written) == ({"load": 2}, {"load": 2})
    expected = mean_losses([losses for losses, _, _ in saved])
    in_memory = on_ranks(2, resume_in_memory, str(tmp_path))
    for found in (mean_losses([losses for losses, _, _ in resumed]), mean_losses(in_memory)):
        assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
        for number, loss in found.items():
            assert loss == pytest.approx(expected[number], rel=1e-4)


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


def test_buffers_that_are_too_small_are_named_before_the_run(tmp_path: Path) -> None:
    offload = Offload("nvme", path=tmp_path, buffer_numel=10_000)
    trainer = quiet_trainer(devices=1, strategy=ParalZeROStrategy(stage=3, offload_parameters=offload))
    module = Regression()
    module.hidden = nn.Linear(FEATURES, 20_000)
    module.out = nn.Linear(20_000, 2)

    with pytest.raises(ConfigurationError, match=r"hidden\.weight has 160000 elements"):
        trainer.fit(module, regression_data(1, 1))
