"""Our strategies resume from checkpoints of Lightning's own strategies, and these from ours."""

import subprocess
import sys
from functools import partial
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

from lightning_paral import CheckpointError, ParalZeROStrategy
from lightning_paral.checkpoint.convert import convert
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.models.resumable import Losses, Resumable, assert_continues, fit, losses, refusal

OURS = ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")


class Sharded(Resumable):
    """Shards itself, for Lightning's `ModelParallelStrategy`. FSDP2 does not accept 0-dimensional parameters."""

    def __init__(self) -> None:
        super().__init__(scalar=False)

    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class ModelParallelOnCPU(ModelParallelStrategy):
    """Return the strategy for two data-parallel ranks on CPU."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=2, tensor_parallel_size=1)


# Lightning's files and folders


def ddp_of_lightning() -> Any:
    return LightningDDPStrategy(process_group_backend="gloo")


def one_dimensional() -> Resumable:
    return Resumable(scalar=False)


# Lightning's FSDPStrategy, on FSDP1


class FSDP1OnCPU(FSDPStrategy):
    """Lightning's strategy, with FSDP1 told to compute on the CPU, because by default it looks for an accelerator."""

    def __init__(self, state_dict_type: Any) -> None:
        super().__init__(state_dict_type=state_dict_type, auto_wrap_policy=is_unit)

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def gathering_on_cpu(module: torch.nn.Module, **_: Any) -> Any:
    """Lightning's context of a full checkpoint, without offloading: FSDP1 would save CPU tensors after freeing them."""
    kept = {"offload_to_cpu": False, "rank0_only": True}
    return FullyShardedDataParallel.state_dict_type(
        module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(**kept), FullOptimStateDictConfig(**kept)
    )


def is_unit(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Make two units; the tied and the frozen weights belong to the root."""
    return recurse or (isinstance(module, torch.nn.Linear) and module.in_features != module.out_features)


class GroupedByName(Resumable):
    """Groups parameters by name: FSDP1 flattens them, so that their dimensions do not show which are biases."""

    def __init__(self) -> None:
        super().__init__(scalar=False)

    def configure_optimizers(self) -> Any:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        weights = [p for name, p in trained if name.endswith("weight")]
        others = [p for name, p in trained if not name.endswith("weight")]
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3, "lr": 2e-2}, {"params": others}], lr=1e-2)


def save_with_fsdp1(form: str, save_to: Path) -> Losses:
    with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", gathering_on_cpu):
        return losses(partial(FSDP1OnCPU, form), GroupedByName, save_to=save_to)


@pytest.mark.parametrize(
    ("save", "make"),
    [
        (partial(losses, ddp_of_lightning), Resumable),
        (partial(losses, ModelParallelOnCPU, Sharded), one_dimensional),
        (partial(save_with_fsdp1, "sharded"), GroupedByName),
        (partial(save_with_fsdp1, "full"), GroupedByName),
    ],
)
def test_checkpoints_of_lightning_resume(on_ranks, tmp_path: Path, save: Any, make: Any) -> None:
    path = tmp_path / "theirs.ckpt"
    whole = on_ranks(2, partial(save, save_to=path))
    for label, num_ranks in (("paral_ddp", 1), *((label, 2) for label in OURS)):
        assert_continues(on_ranks(num_ranks, partial(losses, label, make, resume_from=path)), whole)


# Our checkpoints in Lightning


@pytest.mark.parametrize("strategy", ["paral_dp", "paral_ddp", "paral_fsdp", "paral_zero3"])
def test_full_form_is_an_ordinary_file_of_lightning(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "ours.ckpt")
    whole = on_ranks(1 if strategy == "paral_dp" else 2, partial(losses, strategy, checkpoint="full", save_to=path))

    assert_continues([losses("one process", resume_from=path)], whole)
    loaded = Resumable.load_from_checkpoint(path)
    saved = torch.load(path)["state_dict"]
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, saved[name])
    assert saved["tied.weight"].data_ptr() == saved["second.weight"].data_ptr()


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero3"])
def test_sharded_form_is_an_ordinary_distributed_checkpoint(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "ours.ckpt")
    whole = on_ranks(2, partial(losses, strategy, one_dimensional, checkpoint="sharded", save_to=path))

    assert_continues(on_ranks(2, partial(losses, ModelParallelOnCPU, Sharded, resume_from=path)), whole)
    dcp_to_torch_save(path, tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    convert(path, str(tmp_path / "consolidated.ckpt"))
    consolidated = Resumable.load_from_checkpoint(tmp_path / "consolidated.ckpt", scalar=False).state_dict()
    assert consolidated.keys() == converted["state_dict"].keys()
    for name, value in consolidated.items():
        torch.testing.assert_close(converted["state_dict"][name], value)


# DeepSpeed's folders


class OnCPU(ParalZeROStrategy):
    """Saves in DeepSpeed's format, like Lightning's DeepSpeedStrategy, which needs CUDA."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        from lightning_paral.engines.zero.partition import ScalarsAsBytes

        assert self.lightning_module is not None
        self.saved = {name: self.full_parameter(p) for name, p in self.lightning_module.named_parameters()}
        self.exclude_frozen_parameters = False
        users, engine = self._engine._users, self.model
        assert users is not None
        steps = engine.module  # around the LightningModule, which Lightning's strategy gives to DeepSpeed itself
        engine.module = steps.module
        engine.param_names = {parameter: name.removeprefix("module.") for parameter, name in engine.param_names.items()}
        with ScalarsAsBytes(), users.flat():
            DeepSpeedStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        engine.module = steps


def save_with_deepspeed(path: str, stage: int) -> dict[str, Any]:
    """Save with bf16 weights, and return the master weights."""
    strategy = OnCPU(stage=stage)
    fit(strategy, 2, save_to=path, precision="bf16-true")
    return strategy.saved


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lines_of_the_error_convert_a_deepspeed_folder(on_ranks, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "it's theirs.ckpt"
    expected = on_ranks(2, save_with_deepspeed, str(path), stage)[0]

    with pytest.raises(CheckpointError, match="which only DeepSpeed reads") as raised:
        load(path, RankGroup())
    lines = [line for line in str(raised.value).splitlines() if line.startswith("python ")]
    for line in lines:
        subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True, timeout=120)
    resumed = Path(f"{path}-fp32.ckpt")
    weights_alone = torch.load(Path(f"{path}-fp32") / "pytorch_model.bin")
    lost = {"frozen.weight", "frozen.bias"} if stage == 1 else set()  # DeepSpeed's script leaves them out
    for found in (load(resumed, RankGroup())["state_dict"], weights_alone):
        for name in expected.keys() - lost:
            torch.testing.assert_close(found[name].clone(), expected[name], rtol=0, atol=0, check_dtype=False)
    for message in on_ranks(2, partial(refusal, "paral_ddp", resume_from=resumed)):
        assert "CheckpointOptions(restore_optimizer=False)" in message
    for label in OURS if not lost else ():
        on_ranks(2, partial(losses, label, checkpoint={"restore_optimizer": False}, resume_from=resumed))
