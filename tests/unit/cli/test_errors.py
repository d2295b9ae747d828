"""Mistakes on the command line and in YAML are errors of a few lines that name the option."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import run_paral

ROOT = Path(__file__).parents[3]
ZERO, DDP, FSDP = (f"lightning_paral.Paral{name}Strategy" for name in ("ZeRO", "DDP", "FSDP"))


def strategy(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"trainer": {"strategy": {"class_path": class_path, "init_args": init_args}}}


def of_trainer(**options: Any) -> dict[str, Any]:
    return {"trainer": options}


YAML: list[tuple[dict[str, Any], str]] = [
    (strategy(DDP, all_reduc="ring"), "trainer.strategy.all_reduc: ParalDDPStrategy has no option 'all_reduc'. Did"),
    (strategy(DDP, all_reduce="rng"), "ParalDDPStrategy(all_reduce='rng'): all_reduce has to be 'auto', 'ring'"),
    (strategy(DDP, timeout="30s"), "trainer.strategy.timeout: ParalDDPStrategy(timeout='30s'): timeout has to be"),
    (
        strategy(DDP, bucket_cap_mb=-5),
        "paral: ParalDDPStrategy(bucket_cap_mb=-5.0): buckets must be larger than 0 MiB.",
    ),
    (strategy(ZERO, stage=4), "trainer.strategy.stage: ParalZeROStrategy(stage=4): stage has to be 1, 2 or 3."),
    (strategy(ZERO, offload_optimiser="cpu"), "has no option 'offload_optimiser'. Did you mean offload_optimizer?"),
    (strategy(ZERO, offload_optimizer=True), "offload_optimizer has to be Offload(...), 'cpu', 'nvme' or None."),
    (strategy(ZERO, offload_optimizer={"pth": "/x"}), "offload_optimizer.pth: Offload has no option 'pth'."),
    (strategy(ZERO, deepspeed_config={"gradient_clip": 1}), "Did you mean 'gradient_clipping'?"),
    (
        strategy(FSDP, checkpoint={"form": "shard"}),
        "CheckpointOptions(form='shard'): form has to be 'full', 'sharded' or None.",
    ),
    (strategy(FSDP, activation_checkpointing={"unit": []}), "activation_checkpointing.unit: Activation"),
    (strategy("lightning_paral.ParalFSDPStrateg"), "There is no lightning_paral.ParalFSDPStrateg."),
    (of_trainer(strategy={"class_path": DDP, "all_reduce": "ring"}), "'all_reduce' is next to class_path."),
    (of_trainer(strategy="paral_zero4"), "paral: There is no strategy named 'paral_zero4'. Did you mean"),
    (of_trainer(stratgy="paral_ddp"), "There is no option 'trainer.stratgy'. Did you mean trainer.strategy"),
    ({"trainr": {"strategy": "paral_ddp"}}, "There is no option 'trainr'. Did you mean trainer?"),
    (of_trainer(max_steps="ten"), "trainer.max_steps"),
]
COMMAND_LINE = [
    (
        ["ParalDDPStrategy", "--trainer.strategy.wire_dtype=fp8"],
        "(wire_dtype='fp8'): wire_dtype has to be 'bf16', 'fp16' or None.",
    ),
    (["ParalFSDPStrategy", "--trainer.strategy.offload=nvme"], "strategy.offload: ParalFSDPStrategy(offload='nvme')"),
    (["paral_ddp", "--model.widht=3"], "model.widht: GPT has no option 'widht'. Did you mean width?"),
]


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.chdir(ROOT)
    fixed = ["--config", "configs/gpt.yaml", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    code = run_paral("fit", *fixed, *arguments)
    return (code if isinstance(code, str) else "") + capsys.readouterr().err


@pytest.mark.parametrize(("config", "message"), YAML, ids=lambda value: str(value)[:60])
def test_mistake_in_yaml_names_the_option(
    monkeypatch, capsys, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))

    text = said(monkeypatch, capsys, "--config", str(tmp_path / "wrong.yaml"))

    assert message in text
    assert "paral: " in text
    assert len(text.splitlines()) <= 15


@pytest.mark.parametrize(("arguments", "message"), COMMAND_LINE, ids=lambda value: str(value)[:60])
def test_mistake_on_the_command_line_names_the_option(monkeypatch, capsys, arguments: list[str], message: str) -> None:
    text = said(monkeypatch, capsys, f"--trainer.strategy={arguments[0]}", *arguments[1:])

    assert message in text
    assert len(text.splitlines()) <= 15
