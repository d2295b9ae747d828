"""Mistakes of users raise before any launch an error that says what is wrong, what was given, and what to do."""

import logging
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import lightning_paral
from lightning_paral import (
    ActivationCheckpointing,
    ConfigurationError,
    Offload,
    ParalDDPStrategy,
    ParalDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)
from lightning_paral.error_report import install_brief_excepthook
from lightning_paral.errors import CheckpointError
from tests.running import quiet_trainer

OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    # Names
    (ParalDDPStrategy, {"all_reduc": "ring"}, "ParalDDPStrategy has no option 'all_reduc'. Did you mean all_reduce?"),
    (ParalDDPStrategy, {"units": ["Block"]}, "no option 'units'. `help(ParalDDPStrategy)` describes its options."),
    (ParalDPStrategy, {"timeout": 30}, "no option 'timeout'. Use paral_ddp"),
    (ParalFSDPStrategy, {"cpu_offload": True}, "no option 'cpu_offload'. Use offload=True."),
    (ParalZeROStrategy, {"zero_optimization": {"stage": 2}}, "Use deepspeed_config={'zero_optimization': {...}}."),
    (ActivationCheckpointing, {"unit": ["Block"]}, "ActivationCheckpointing has no option 'unit'. Did you mean units?"),
    # Types and values: one of each kind of annotation
    (ParalDDPStrategy, {"accelerator": "gpu"}, "It belongs to the Trainer: Trainer(accelerator=..., strategy=...)."),
    (ParalDDPStrategy, {"static_graph": "yes"}, "(static_graph='yes'): static_graph has to be True or False."),
    (ParalDDPStrategy, {"timeout": "30"}, "timeout has to be timedelta(...) or a number."),
    (ParalDDPStrategy, {"split": "globl"}, "split has to be 'batch' or 'global'."),
    (ParalDDPStrategy, {"wire_dtype": torch.bfloat16}, "torch.bfloat16): wire_dtype has to be 'bf16', 'fp16' or None."),
    (ParalDDPStrategy, {"checkpoint": True}, "checkpoint has to be CheckpointOptions(...), 'full', 'sharded' or None."),
    (ParalDDPStrategy, {"model_averaging_period": 4}, "Use ParalLocalSGDStrategy(period=...)."),
    (
        ParalDDPStrategy,
        {"activation_checkpointing": ActivationCheckpointing},
        "activation_checkpointing has to be ActivationCheckpointing(...) or None.",
    ),
    (
        ParalFSDPStrategy,
        {"units": [3]},
        "units has to be a string, a class, a list (each a string or a class) or a function.",
    ),
    (ParalFSDPStrategy, {"offload": "cpu"}, "offload has to be True or False. FSDP offloads to host memory"),
    *(
        (each, {"min_params": 1000}, "a function of name and module, such as of the number of its parameters")
        for each in (ParalFSDPStrategy, ParalPipelineStrategy, ActivationCheckpointing)
    ),
    (ParalFSDPStrategy, {"plan": ["up"]}, "(plan=['up']): plan has to be 'auto' or a dict."),
    (ParalZeROStrategy, {"stage": True}, "stage has to be 1, 2 or 3. 1 shards the optimizer state"),
    (ParalZeROStrategy, {"offload_optimizer": "gpu"}, "has to be Offload(...), 'cpu', 'nvme' or None."),
    (Offload, {"ratio": 2}, "All of the optimizer is offloaded."),
    (Offload, {"buffer_count": 0}, "buffer_count has to be an integer of at least 1."),
    (Offload, {"device": "nvme"}, "PARAL_NVME_PATH"),
    # What an engine cannot do
    (ParalDDPStrategy, {"timeout": -30}, "timeout=-30 has to be longer than zero"),
    (ParalDDPStrategy, {"bucket_cap_mb": -5}, "bucket_cap_mb=-5): buckets must be larger than 0 MiB."),
    (ParalDDPStrategy, {"ddp_comm_hook": print, "all_reduce": "ring"}, "Give one or the other."),
    (ParalZeROStrategy, {"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage=3, but stage=2"),
    # DeepSpeed's configuration
    (ParalZeROStrategy, {"deepspeed_config": "ds.json"}, "'ds.json' is not a JSON file: "),
    (ParalZeROStrategy, {"deepspeed_config": {"gradient_clip": 1.0}}, "Did you mean 'gradient_clipping'?"),
    (ParalZeROStrategy, {"deepspeed_config": {"zero_optimization": 2}}, "and so must its section zero_optimization"),
    (ParalZeROStrategy, {"deepspeed_config": {"stage": 2}}, "belong to the section zero_optimization."),
    (ParalZeROStrategy, {"deepspeed_config": {"train_batch_size": 8}}, "train_batch_size=8, which Lightning controls"),
]


@pytest.mark.parametrize(("make", "options", "message"), OPTIONS, ids=lambda value: str(value)[:60])
def test_wrong_option_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(**options)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_options_by_position_are_refused() -> None:
    for make in (ActivationCheckpointing, ParalDDPStrategy):
        with pytest.raises(ConfigurationError, match=rf"too many positional arguments.* as in {make.__name__}\("):
            make("ring")  # type: ignore[call-arg, misc]


def test_right_options_are_accepted(tmp_path: Path) -> None:
    assert ParalDDPStrategy(timeout=30).timeout == timedelta(seconds=30)
    assert ParalFSDPStrategy(timeout=1.5).timeout == timedelta(seconds=1.5)
    ParalDDPStrategy(bucket_cap_mb=0.5, static_graph=True, broadcast_buffers=None)
    for units in (nn.Linear, "Linear", [nn.Linear, "Conv2d"], {nn.Linear}, lambda name, module: True):
        ParalFSDPStrategy(units=units)
    ParalZeROStrategy(stage=3, gather_bucket_numel=0, offload_optimizer=Offload("nvme", path=tmp_path))
    ParalZeROStrategy(logging_level=logging.INFO, deepspeed_config=REAL_CONFIG)


REAL_CONFIG = {
    "_comment": "as written for other programs",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "contiguous_gradients": True},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
    "tensorboard": {"enabled": False, "output_path": "x", "job_name": "y"},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "profile": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}


TRAINERS: list[tuple[Any, dict[str, Any], str]] = [
    ("paral_dp", {"num_nodes": 2}, "paral_dp is one process on one node, but num_nodes=2"),
    ("paral_zero2", {"precision": "16-true"}, "fp16, which DeepSpeed does not support on CPU. Use 'bf16-true'."),
    (lambda: ParalFSDPStrategy(replicate=3), {}, "replicate=3 does not divide the 2 ranks"),
    (lambda: ParalFSDPStrategy(replicate=0), {}, "replicate=0 does not divide the 2 ranks. Choose one of 1, 2"),
    (lambda: ParalDDPStrategy(process_group_backend="glo"), {}, "needs 'glo', which this build of torch does not have"),
    (
        lambda: ParalZeROStrategy(deepspeed_config={"fp16": {"enabled": True}}),
        {},
        "fp16.enabled=True, but the strategy's arguments and the Trainer, such as its precision, say False",
    ),
    (
        lambda: ParalZeROStrategy(deepspeed_config={"bf16": {"enabled": True}}),
        {"precision": "bf16-mixed"},
        "bf16.enabled=True, but the strategy's arguments and the Trainer, such as its precision, say False",
    ),
    (
        lambda: ParalZeROStrategy(deepspeed_config={"bf16": {"enabled": False}}),
        {"precision": "bf16-true"},
        "say True. Make them agree, or remove bf16.enabled",
    ),
]


@pytest.mark.parametrize(("strategy", "options", "message"), TRAINERS, ids=lambda value: str(value)[:40])
def test_wrong_trainer_argument_is_refused(strategy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(strategy=strategy() if callable(strategy) else strategy, devices=2, **options)
    assert message in str(caught.value)


def test_fabric_is_refused() -> None:
    for strategy in ("paral_zero2", ParalDDPStrategy()):
        with pytest.raises(ValueError, match="You selected an invalid strategy"):
            Fabric(strategy=strategy, accelerator="cpu")  # type: ignore[arg-type]
    Fabric(strategy="ddp", accelerator="cpu", devices=1)


OLD_NAME = """
import lightning_paral
import pytorch_lightning
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.demos.boring_classes import BoringModel
trainer = pytorch_lightning.Trainer(
    strategy="paral_dp", accelerator="cpu", devices=1, logger=False, max_steps=1, enable_checkpointing=False,
    enable_progress_bar=False, limit_val_batches=0, callbacks=[Callback()],
)
trainer.fit(BoringModel())
print("step", trainer.global_step)
"""


def run_script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    root = Path(lightning_paral.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)


def test_libraries_that_import_the_old_name_of_lightning_train_with_the_documented_lines(tmp_path: Path) -> None:
    page = (Path(lightning_paral.__file__).parents[1] / "docs/guides/own-project.md").read_text()
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pytorch_lightning" in block]

    done = run_script(tmp_path, lines + OLD_NAME)

    assert done.stdout.count("step 1") == 1, done
    assert done.returncode == 0


def test_uncaught_error_shows_only_lines_of_the_user(tmp_path: Path) -> None:
    call = "Trainer(strategy='paral_dp', accelerator='cpu', num_nodes=2)"
    text = f"import lightning_paral\nfrom lightning.pytorch import Trainer\n{call}\n"
    printed = run_script(tmp_path, text).stderr.splitlines()
    printed = printed[printed.index("Traceback (most recent call last):") :]  # imports may have warned
    assert printed[1].endswith('script.py", line 3, in <module>')
    assert printed[-1].startswith("lightning_paral.errors.ConfigurationError: paral_dp is one process on one node")
    assert len(printed) <= 5


def test_error_with_a_cause_in_user_code_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: reported.append(error[1]))
    install_brief_excepthook()

    def explained(inside: Any) -> BaseException:
        try:
            try:
                inside()
            except RuntimeError as error:
                raise CheckpointError("explained") from error
        except CheckpointError as error:
            return error
        raise AssertionError

    def users_step() -> None:
        raise RuntimeError("in the step")

    in_step = explained(users_step)
    sys.excepthook(type(in_step), in_step, in_step.__traceback__)
    assert reported == [in_step]
    in_torch = explained(lambda: torch.zeros(2) + torch.zeros(3))
    assert in_torch.__cause__ is not None
    in_torch.__cause__.__traceback__ = None  # as if it had only frames of libraries
    sys.excepthook(type(in_torch), in_torch, in_torch.__traceback__)
    other = KeyError("x")
    sys.excepthook(type(other), other, None)
    assert reported == [in_step, other]
    assert capsys.readouterr().err.rstrip().endswith("lightning_paral.errors.CheckpointError: explained")
