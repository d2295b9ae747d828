"""Our strategies resume from checkpoints of Lightning's own strategies, and these from ours."""

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
from lightning_paral.checkpoint.consolidate import write_file
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.agreement import RankGroup
from tests.models.resumable import (
    NUM_BATCHES,
    SAVED_AFTER,
    Losses,
    Resumable,
    assert_continues,
    fit,
    losses,
    mean_losses,
    refusal,
)
from tests.running import quiet_trainer

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


# Lightning's files and folders


def ddp_of_lightning() -> Any:
    return LightningDDPStrategy(process_group_backend="gloo")


def save_with_ddp_of_lightning(path: str) -> None:
    losses(ddp_of_lightning, save_to=path)


def one_dimensional() -> Resumable:
    return Resumable(scalar=False)


def assert_ours_continue(on_ranks: Any, path: Path, make: Any, whole: Any) -> None:
    for label in OURS:
        assert_continues(on_ranks(2, partial(losses, label, make, resume_from=path)), whole)
    assert_continues(on_ranks(1, partial(losses, "paral_ddp", make, resume_from=path)), whole)


@pytest.mark.parametrize(
    ("strategy", "theirs", "ours"),
    [(ddp_of_lightning, Resumable, Resumable), (ModelParallelOnCPU, Sharded, one_dimensional)],
)
def test_checkpoints_of_lightning_resume(on_ranks, tmp_path: Path, strategy: Any, theirs: Any, ours: Any) -> None:
    whole = on_ranks(2, partial(losses, strategy, theirs, save_to=tmp_path / "theirs.ckpt"))
    assert_ours_continue(on_ranks, tmp_path / "theirs.ckpt", ours, whole)


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


def save_with_fsdp1(path: Path, form: str) -> Losses:
    with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", gathering_on_cpu):
        return losses(partial(FSDP1OnCPU, form), GroupedByName, save_to=path)


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_checkpoints_of_lightnings_fsdp_strategy_resume(on_ranks, tmp_path: Path, form: str) -> None:
    whole = on_ranks(2, save_with_fsdp1, tmp_path / "theirs.ckpt", form)
    assert_ours_continue(on_ranks, tmp_path / "theirs.ckpt", GroupedByName, whole)


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
    module = Resumable()
    module.validation_step = lambda *_: None  # type: ignore[method-assign]
    trainer = quiet_trainer(devices=2, strategy=strategy)
    trainer.validate(module, torch.utils.data.DataLoader(range(2)), ckpt_path=path, verbose=False)  # type: ignore[arg-type]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


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

    for message in on_ranks(2, partial(refusal, strategy, resume_from=path)):
        assert "CheckpointOptions(restore_optimizer=False)" in message
    anew = partial(losses, strategy, checkpoint={"restore_optimizer": False}, resume_from=path)
    found = mean_losses(on_ranks(2, anew))
    assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
    for number in (4, 5):  # before the optimizer's first step
        assert found[number] == pytest.approx(expected[number], rel=1e-5)


def test_deepspeed_folder_that_lacks_a_rank_is_refused(on_ranks, tmp_path: Path) -> None:
    path = tmp_path / "theirs.ckpt"
    on_ranks(2, save_with_deepspeed, str(path), "bf16-true", {"stage": 1})
    (path / "checkpoint" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="optimizer states of 1 of 2 ranks"):
        load(path, RankGroup())


def test_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    assert "is not a checkpoint" in refusal("paral_ddp", resume_from=tmp_path)
    assert "There is no checkpoint at" in refusal("paral_ddp", resume_from=tmp_path / "nowhere")
