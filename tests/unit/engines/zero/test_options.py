"""Invalid input to the ZeRO strategies raises one error with the remedy before processes are launched."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_paral import ConfigurationError, Offload, ParalZeROStrategy
from lightning_paral.engines.zero import options as settings
from lightning_paral.engines.zero import process as runtime
from lightning_paral.engines.zero.offload import check_free_space
from lightning_paral.engines.zero.optimizer import UsersOptimizer, check_optimizers
from lightning_paral.engines.zero.partition import check_not_partitioned
from lightning_paral.tested_versions import TESTED_VERSIONS
from tests.compile_operators import skip_unless_compilable
from tests.models.regression import Regression
from tests.running import quiet_trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2, "offload_optimizer": Offload("nvme", path="/x")}, "needs stage=3, but stage=2. Use 'cpu'"),
        ({"deepspeed_config": {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}}, "ratio=0.5.* as a whole"),
        ({"deepspeed_config": {"gradient_accumulation_steps": 4}}, r"gradient_accumulation_steps=4.*accumulate_grad"),
        ({"deepspeed_config": {"gradient_clipping": 1.0}}, r"gradient_clipping=1.0.*gradient_clip_val"),
        ({"deepspeed_config": {"optimizer": {"type": "Adam"}}}, "configure_optimizers"),
        ({"deepspeed_config": {"zero_optimization": {"compute_grad_norm": False}}}, r"compute_grad_norm=False.*clip"),
        ({"stage": 2, "deepspeed_config": {"zero_optimization": {"stage": 3}}}, r"stage=3.*say 2"),
        (
            {"reduce_bucket_numel": 10, "deepspeed_config": {"zero_optimization": {"reduce_bucket_size": 20}}},
            "reduce_bucket_size=20.*say 10",
        ),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParalZeROStrategy(**options)


def test_nvme_by_name_needs_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARAL_NVME_PATH", raising=False)
    with pytest.raises(ConfigurationError, match="PARAL_NVME_PATH"):
        Trainer(strategy="paral_zero3_nvme", accelerator="cpu", devices=2)


@pytest.mark.parametrize(
    ("folder", "message"), [("/missing/folder", "no such folder"), ("/proc", r"direct I/O|cannot be written")]
)
def test_nvme_folder_has_to_exist_and_to_do_direct_io(folder: str, message: str) -> None:
    skip_unless_compilable()
    strategy = ParalZeROStrategy(stage=3, offload_optimizer=Offload("nvme", path=folder))
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(strategy=strategy, devices=2)


def test_nvme_space_is_compared_with_the_need(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"1000000.00 GB there, but only [\d.]+ GB are free"):
        check_free_space(tmp_path, 10**15)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_fp16_on_cpu_is_refused(precision: str) -> None:
    with pytest.raises(ConfigurationError, match=f"precision='{precision}'.*bf16-"):
        quiet_trainer(strategy="paral_zero2", devices=2, precision=precision)


def test_old_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED_VERSIONS, "deepspeed", ">=99.0,<100")
    with pytest.raises(ConfigurationError, match=r"99\.0 or later, but .* is installed: pip install"):
        ParalZeROStrategy()


def test_missing_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise runtime.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(runtime.metadata, "version", version)
    with pytest.raises(ConfigurationError, match="not installed: pip install"):
        ParalZeROStrategy()


def test_deepspeed_with_another_accelerator_is_refused() -> None:
    program = (
        "import os, torch; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "import deepspeed; deepspeed.accelerator.get_accelerator()\n"
        "from lightning_paral.engines.zero.process import choose_accelerator\n"
        "choose_accelerator(torch.device('cpu'))\n"
        "try: choose_accelerator(torch.device('cuda', 0))\n"
        "except ValueError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "was imported before and uses 'cpu'" in result.stdout
    assert "DS_ACCELERATOR=cuda" in result.stdout


def test_configuration_from_a_file_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    zero = {"ignore_unused_parameters": False, "reduce_bucket_size": "auto", "overlap_comm": "auto"}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    ours = {"zero_optimization": {"stage": 2}}
    config = settings.complete(ours, settings.load_config(path))
    assert config["zero_optimization"] == {"stage": 2, "ignore_unused_parameters": False}
    assert "train_batch_size" not in config


@pytest.mark.parametrize(
    ("section", "option"), [("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")]
)
def test_nvme_is_an_option_of_the_strategy(section: str, option: str) -> None:
    config = {"zero_optimization": {section: {"device": "nvme", "nvme_path": "/tmp"}}}

    with pytest.raises(ConfigurationError, match=rf"ParalZeROStrategy\({option}=Offload\('nvme'"):
        settings.load_config(config)


@pytest.mark.parametrize(
    ("device_type", "num_ranks", "stage", "others"),
    [
        ("cuda", 2, 2, {"reduce_bucket_size", "allgather_bucket_size", "overlap_comm"}),
        ("cuda", 1, 2, {"reduce_bucket_size", "allgather_bucket_size"}),
        ("cuda", 2, 3, {"reduce_bucket_size"}),
        ("cpu", 2, 2, {"reduce_bucket_size", "allgather_bucket_size", "use_multi_rank_bucket_allreduce"}),
        ("cpu", 2, 3, {"reduce_bucket_size", "prefetch_bucket_size", "max_reuse_distance"}),
    ],
)
def test_only_sizes_differ_from_deepspeeds_defaults_except_on_gloo(
    device_type: str, num_ranks: int, stage: int, others: set[str]
) -> None:
    runtime.choose_accelerator(torch.device("cpu"))
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def config_of(section: dict[str, Any]) -> dict[str, Any]:
        return DeepSpeedZeroConfig(**section).model_dump()

    theirs = config_of({"stage": stage})
    filled = settings.add_device_defaults(
        {"stage": stage}, stage, 2_000_000_000, device_type=device_type, num_ranks=num_ranks
    )
    ours = config_of(filled)
    assert {key for key in ours if ours[key] != theirs[key]} == others


def test_objects_that_are_not_optimizers_are_refused_also_if_trusted() -> None:
    module = Regression()
    with pytest.raises(ConfigurationError, match=r"builtins\.object may not be elementwise"):
        check_optimizers([object()], module, trust=True)


def test_module_that_is_partitioned_already_is_refused() -> None:
    module = Regression()
    module.out.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"partitioned already.* load a checkpoint"):
        check_not_partitioned(module)


def test_module_without_trained_parameters_is_refused() -> None:
    module = Regression().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="nothing to train"):
        UsersOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module)
