"""Our strategies resume from checkpoints of Lightning's own strategies, and these from ours."""

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

from lightning_paral import CheckpointError, ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.checkpoint.consolidate import write_file
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.options import CheckpointOptions
from tests.models.resumable import Resumable, fit, mean_losses

ABOUT = {"form": "full", "strategy": "", "world_size": 2, "epoch": 0, "global_step": 2}
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
def test_checkpoints_of_lightning_resume(on_ranks, tmp_path: Path, save: Any, scalar: bool) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = on_ranks(2, save, path)
    for strategy in OURS:
        assert_same_losses(on_ranks(2, resume, path, strategy, 2, scalar), expected)
    assert_same_losses(on_ranks(1, resume, path, "paral_ddp", 1, scalar), expected)


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
def test_checkpoints_of_lightnings_fsdp_strategy_resume(on_ranks, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = on_ranks(2, save_with_fsdp1, path, form)
    for strategy in OURS:
        assert_same_losses(on_ranks(2, resume_from_fsdp1, path, strategy, 2), expected)
    assert_same_losses(on_ranks(1, resume_from_fsdp1, path, "paral_ddp", 1), expected)


# Our checkpoints in Lightning


def save(path: str, strategy: str, form: Any) -> dict[int, float]:
    made: Any = {"ddp": ParalDDPStrategy, "fsdp": ParalFSDPStrategy, "zero3": ParalZeROStrategy}[strategy]
    stage = {"stage": 3} if strategy == "zero3" else {}
    return fit(
        made(checkpoint=form, **stage), 2, save_to=path, module=seeded(lambda: Resumable(scalar=form == "full"))
    ).losses


def resume_in_model_parallel(path: str) -> dict[int, float]:
    return fit(ModelParallelOnCPU(), 2, resume_from=path, module=Sharded()).losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_full_form_is_an_ordinary_file_of_lightning(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "ours.ckpt")
    expected = on_ranks(2, save, path, strategy, "full")

    assert_same_losses([fit("auto", 1, resume_from=path).losses], expected)
    loaded = Resumable.load_from_checkpoint(path)
    saved = torch.load(path)["state_dict"]
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, saved[name])
    assert saved["tied.weight"].data_ptr() == saved["second.weight"].data_ptr()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_sharded_form_is_an_ordinary_distributed_checkpoint(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "ours.ckpt")
    expected = on_ranks(2, save, path, strategy, "sharded")

    assert_same_losses(on_ranks(2, resume_in_model_parallel, path), expected)
    dcp_to_torch_save(path, tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    write_file(load(path, RankGroup()), tmp_path / "consolidated.ckpt", ABOUT, lambda nbytes: None)
    consolidated = Resumable.load_from_checkpoint(tmp_path / "consolidated.ckpt", scalar=False).state_dict()
    assert consolidated.keys() == converted["state_dict"].keys()
    for name, value in consolidated.items():
        torch.testing.assert_close(converted["state_dict"][name], value)


# DeepSpeed's folders


class OnCPU(ParalZeROStrategy):
    """Saves in DeepSpeed's format, like Lightning's DeepSpeedStrategy, which needs CUDA."""

    saved: dict[str, Any]
    """The weights when it saved, in fp32 if there are master weights, and the buffers."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        from lightning_paral.engines.zero.parameters.partition import view_scalars_as_bytes

        module = self.lightning_module
        assert module is not None
        named = module.named_parameters(remove_duplicate=False)
        self.saved = {name: self.full_parameter(parameter) for name, parameter in named}
        self.saved |= {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.exclude_frozen_parameters = False
        with view_scalars_as_bytes():
            DeepSpeedStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)


def save_with_deepspeed(path: str, precision: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[int, float]]:
    strategy = OnCPU(**options)
    losses = fit(strategy, 2, save_to=path, precision=precision).losses
    return strategy.saved, losses


def validate_weights(path: str, strategy: str) -> dict[str, Any]:
    from tests.running import quiet_trainer

    module = Resumable()
    module.validation_step = lambda *_: None  # type: ignore[method-assign]
    trainer = quiet_trainer(devices=2, strategy=strategy)
    trainer.validate(module, torch.utils.data.DataLoader(range(2)), ckpt_path=path, verbose=False)  # type: ignore[arg-type]
    return weights(module)


def resume_weights_only(path: str, strategy: str) -> dict[int, float]:
    with pytest.raises(CheckpointError, match=r"CheckpointOptions\(restore_optimizer=False\)"):
        fit(strategy, 2, resume_from=path)
    options = CheckpointOptions(restore_optimizer=False)
    made = ParalDDPStrategy(checkpoint=options) if strategy == "paral_ddp" else ParalZeROStrategy(checkpoint=options)
    losses: dict[int, float] = fit(made, 2, resume_from=path).losses
    return losses


def read_by_deepspeed(path: str) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return {name: value.detach() for name, value in get_fp32_state_dict_from_zero_checkpoint(path).items()}


SUB_GROUPS = {"zero_optimization": {"sub_group_size": 60}}
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
COMPILED = pytest.mark.deepspeed_operators("cpu_adam")
FOLDERS: list[Any] = [
    *((precision, {"stage": stage}) for precision in ("32-true", "bf16-mixed", "bf16-true") for stage in (1, 2, 3)),
    ("bf16-true", {"stage": 2, "deepspeed_config": ROUND_ROBIN}),
    ("bf16-true", {"stage": 3, "deepspeed_config": SUB_GROUPS}),
    pytest.param("bf16-true", {"stage": 2, "offload_optimizer": "cpu"}, marks=COMPILED),
]


@pytest.mark.parametrize(("precision", "options"), FOLDERS, ids=str)
def test_weights_of_a_deepspeed_folder_are_its_master_weights(
    on_ranks, tmp_path: Path, precision: str, options: Any
) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = on_ranks(2, save_with_deepspeed, path, precision, options)[0][0]

    found = load(path, RankGroup())["state_dict"]
    (theirs,) = on_ranks(1, read_by_deepspeed, path)
    trained = [name for name in expected if not name.startswith(("frozen", "norm"))]
    assert found.keys() == expected.keys() >= theirs.keys() >= set(trained)
    for name, value in expected.items():
        if name in trained:
            assert value.dtype == torch.float32
            torch.testing.assert_close(theirs[name], value, rtol=0, atol=0)
        torch.testing.assert_close(found[name].clone(), value, rtol=0, atol=0)
    for strategy in ("paral_ddp", "paral_zero3"):
        for loaded in on_ranks(2, validate_weights, path, strategy):
            for name, value in loaded.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0, check_dtype=False)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_zero2"])
def test_resuming_from_deepspeed_starts_a_new_optimizer(on_ranks, tmp_path: Path, stage: int, strategy: str) -> None:
    path = str(tmp_path / "theirs.ckpt")
    expected = mean_losses(
        [losses for _, losses in on_ranks(2, save_with_deepspeed, path, "32-true", {"stage": stage})]
    )

    found = mean_losses(on_ranks(2, resume_weights_only, path, strategy))

    assert list(found) == [4, 5, 6, 7, 8, 9]
    for number in (4, 5):  # before the optimizer's first step
        assert found[number] == pytest.approx(expected[number], rel=1e-5)


def test_deepspeed_folder_that_lacks_a_rank_is_refused(on_ranks, tmp_path: Path) -> None:
    path = tmp_path / "theirs.ckpt"
    on_ranks(2, save_with_deepspeed, str(path), "bf16-true", {"stage": 1})
    (path / "checkpoint" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="optimizer states of 1 of 2 ranks"):
        load(path, RankGroup())


def test_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        fit("paral_ddp", 1, resume_from=tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        fit("paral_ddp", 1, resume_from=tmp_path / "nowhere")
