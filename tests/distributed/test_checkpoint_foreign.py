"""Checkpoints of Lightning's own strategies load here, and what is written here loads there."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)

from lightning_paral import CheckpointError, ParalDDPStrategy, ParalZeROStrategy
from lightning_paral.checkpoint.consolidate import write_file
from lightning_paral.checkpoint.loading import load
from lightning_paral.checkpoint.ranks import Ranks
from lightning_paral.config import CheckpointOptions
from tests.checkpoint_models import Resumable, fit, mean_losses

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

ABOUT = {"form": "full", "strategy": "", "world_size": 2, "epoch": 0, "global_step": 2}
OURS = ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")


class Sharded(Resumable):
    """For Lightning's `ModelParallelStrategy`, which leaves sharding to the module. FSDP2 takes no 0-d parameters."""

    def __init__(self) -> None:
        super().__init__(scalar=False)

    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class ModelParallelOnCPU(ModelParallelStrategy):
    """Two data-parallel ranks, on CPU."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=2, tensor_parallel_size=1)


def weights(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same_losses(ranks: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    found, wanted = mean_losses(ranks), mean_losses(expected)
    assert list(found) == [4, 5, 6, 7, 8, 9]
    for number, loss in found.items():
        assert loss == pytest.approx(wanted[number], rel=1e-5)


# Lightning's files and folders


def save_with_ddp_of_lightning(path: str) -> dict[int, float]:
    return fit(LightningDDPStrategy(process_group_backend="gloo"), 2, save_to=path).losses


def save_with_model_parallel(path: str) -> dict[int, float]:
    return fit(ModelParallelOnCPU(), 2, save_to=path, module=seeded(Sharded)).losses


def seeded(make: Any) -> Any:
    torch.manual_seed(3)
    return make()


def resume(path: str, strategy: str, world_size: int, scalar: bool) -> dict[int, float]:
    return fit(strategy, world_size, resume_from=path, module=Resumable(scalar)).losses


@pytest.mark.parametrize(("save", "scalar"), [(save_with_ddp_of_lightning, True), (save_with_model_parallel, False)])
def test_what_lightning_saved_is_resumed(on_ranks, tmp_path: Path, save: Any, scalar: bool) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = on_ranks(2, save, path)
    for strategy in OURS:
        assert_same_losses(on_ranks(2, resume, path, strategy, 2, scalar), expected)
    assert_same_losses(on_ranks(1, resume, path, "paral_ddp", 1, scalar), expected)


# Lightning's FSDPStrategy, on FSDP1


class FSDP1OnCPU(FSDPStrategy):
    """Lightning's; only torch's FSDP1 is told that it computes on the CPU, where it would look for an accelerator."""

    def __init__(self, state_dict_type: Any) -> None:
        super().__init__(state_dict_type=state_dict_type, auto_wrap_policy=is_unit)

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def gathering_on_cpu(module: torch.nn.Module, **_: Any) -> Any:
    """Lightning's context of the full form, without offloading: FSDP1 would save what is on CPU after freeing it."""
    kept = {"offload_to_cpu": False, "rank0_only": True}
    return FullyShardedDataParallel.state_dict_type(
        module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(**kept), FullOptimStateDictConfig(**kept)
    )


def is_unit(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Two units, and the root with the tied and the frozen weights."""
    return recurse or (isinstance(module, torch.nn.Linear) and module.in_features != module.out_features)


class GroupedByName(Resumable):
    """FSDP1 shows flat weights, which cannot be told from biases by their dimensions."""

    def __init__(self) -> None:
        super().__init__(scalar=False)

    def configure_optimizers(self) -> Any:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        weights = [p for name, p in trained if name.endswith("weight")]
        others = [p for name, p in trained if not name.endswith("weight")]
        groups = [{"params": weights, "weight_decay": 0.3, "lr": 2e-2}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def save_with_fsdp1(path: str, form: str) -> dict[int, float]:
    with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", gathering_on_cpu):
        return fit(FSDP1OnCPU(form), 2, save_to=path, module=seeded(GroupedByName)).losses


def resume_from_fsdp1(path: str, strategy: str, world_size: int) -> dict[int, float]:
    return fit(strategy, world_size, resume_from=path, module=GroupedByName()).losses


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_what_fsdp_strategy_of_lightning_saved_is_resumed(on_ranks, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = on_ranks(2, save_with_fsdp1, path, form)
    for strategy in OURS:
        assert_same_losses(on_ranks(2, resume_from_fsdp1, path, strategy, 2), expected)
    assert_same_losses(on_ranks(1, resume_from_fsdp1, path, "paral_ddp", 1), expected)


# What we write, in Lightning


def save(path: str, strategy: str, form: str) -> dict[int, float]:
    options = {"checkpoint": form}
    made = ParalDDPStrategy(**options) if strategy == "ddp" else ParalZeROStrategy(stage=3, **options)
    return fit(made, 2, save_to=path, module=seeded(lambda: Resumable(scalar=form == "full"))).losses


def resume_in_model_parallel(path: str) -> dict[int, float]:
    return fit(ModelParallelOnCPU(), 2, resume_from=path, module=Sharded()).losses


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_full_form_is_an_ordinary_file_of_lightning(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "ours.ckpt")
    expected = on_ranks(2, save, path, strategy, "full")

    assert_same_losses([fit("auto", 1, resume_from=path).losses], expected)
    loaded = Resumable.load_from_checkpoint(path)
    saved = torch.load(path)["state_dict"]
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, saved[name])
    assert saved["tied.weight"].data_ptr() == saved["second.weight"].data_ptr()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_sharded_form_is_an_ordinary_distributed_checkpoint(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "ours.ckpt")
    expected = on_ranks(2, save, path, strategy, "sharded")

    assert_same_losses(on_ranks(2, resume_in_model_parallel, path), expected)
    dcp_to_torch_save(path, tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    write_file(load(path, Ranks()), tmp_path / "consolidated.ckpt", ABOUT, lambda nbytes: None)
    consolidated = Resumable.load_from_checkpoint(tmp_path / "consolidated.ckpt", scalar=False).state_dict()
    assert consolidated.keys() == converted["state_dict"].keys()
    for name, value in consolidated.items():
        torch.testing.assert_close(converted["state_dict"][name], value)


# DeepSpeed's folders


class OnCPU(ParalZeROStrategy):
    """Saves as Lightning's DeepSpeedStrategy does, in DeepSpeed's format, which needs CUDA there."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        from lightning_paral.zero.partition import scalars_as_bytes

        self.exclude_frozen_parameters = False
        with scalars_as_bytes():
            DeepSpeedStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)


def save_with_deepspeed(path: str, stage: int) -> dict[str, Any]:
    from tests.checkpoint_models import SAVED_AFTER

    return weights(fit(OnCPU(stage=stage), 2, save_to=path, num_batches=SAVED_AFTER))


def validate_weights(path: str, strategy: str) -> dict[str, Any]:
    from tests.models import quiet_trainer

    module = Resumable()
    module.validation_step = lambda *_: None  # type: ignore[method-assign]
    trainer = quiet_trainer(devices=2, strategy=strategy)
    trainer.validate(module, torch.utils.data.DataLoader(range(2)), ckpt_path=path, verbose=False)  # type: ignore[arg-type]
    return weights(module)


def resume_weights_only(path: str) -> None:
    with pytest.raises(KeyError, match="optimizer state"):
        fit("paral_ddp", 2, resume_from=path)
    fit(ParalDDPStrategy(checkpoint=CheckpointOptions(restore_optimizer=False)), 2, resume_from=path)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_a_deepspeed_folder_are_loaded(on_ranks, tmp_path: Path, stage: int) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = on_ranks(2, save_with_deepspeed, path, stage)[0]
    for strategy in ("paral_ddp", "paral_zero3"):
        for found in on_ranks(2, validate_weights, path, strategy):
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    on_ranks(2, resume_weights_only, path)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        fit("paral_ddp", 1, resume_from=tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        fit("paral_ddp", 1, resume_from=tmp_path / "nowhere")
