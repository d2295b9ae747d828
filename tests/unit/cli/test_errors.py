"""Mistakes on the command line and in YAML are errors of a few lines that name the option and what to do."""

import os
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


YAML: list[tuple[dict[str, Any], str, str]] = [
    (strategy(DDP, all_reduc="ring"), "all_reduc", "Did you mean all_reduce?"),
    (strategy(DDP, all_reduce="rng"), "all_reduce", "'reduce_broadcast'"),
    (strategy(DDP, timeout="30s"), "timeout", "h:m:s"),
    (strategy(DDP, bucket_cap_mb=-5), "bucket_cap_mb=-5", ""),
    (strategy(ZERO, offload_optimizer=True), "offload_optimizer", "['cpu', 'nvme']"),
    (strategy(ZERO, offload_optimizer={"pth": "/x"}), "offload_optimizer", "Did you mean path?"),
    (strategy(ZERO, deepspeed_config={"gradient_clip": 1}), "deepspeed_config", "Did you mean 'gradient_clipping'?"),
    (strategy(FSDP, auto_wrap_policy=[]), "auto_wrap_policy", "units="),
    (strategy(FSDP, checkpoint={"form": "shard"}), "form", "['full', 'sharded']"),
    (strategy("lightning_paral.ParalFSDPStrateg"), "ParalFSDPStrateg", "Did you mean ParalFSDPStrategy"),
    (of_trainer(strategy={"class_path": DDP, "all_reduce": "ring"}), "all_reduce", "init_args"),
    (of_trainer(strategy="paral_zero4"), "paral_zero4", "Did you mean"),
    (of_trainer(stratgy="paral_ddp"), "trainer.stratgy", "Did you mean strategy?"),
    ({"trainr": {"strategy": "paral_ddp"}}, "trainr", "Did you mean trainer?"),
    (of_trainer(max_steps="ten"), "trainer.max_steps", "int"),
]
COMMAND_LINE = [
    ("fit --trainer.strategy=ParalDDPStrategy --trainer.strategy.wire_dtype=fp8", "wire_dtype", "['bf16', 'fp16']"),
    (
        "fit --trainer.strategy=paral_fsdp --trainer.strategy.offload=true",
        "paral_fsdp",
        "lightning_paral.ParalFSDPStrategy",
    ),
    ("fit --trainer.stratgy=paral_ddp", "trainer.stratgy", "Did you mean strategy?"),
    ("fit --model.widht=3", "widht", "Did you mean width?"),
    ("fit --model=examples.gtp.GPT", "gtp", "Did you mean gpt?"),
    ("plan --config=configs/gpt.yaml --wrld-size=2", "wrld-size", "Did you mean world-size?"),
    ("consolidate x y --max-shard-sise=1GB", "max-shard-sise", "Did you mean max-shard-size?"),
    ("consolidate x y --dtype=fp8", "--dtype", "bf16"),
    ("doktor", "doktor", "Did you mean doctor?"),
]


def check_is_short(text: str, option: str, remedy: str) -> None:
    """Assert that an error names the option and the remedy in at most 15 lines of a terminal of 80 columns."""
    assert text.removeprefix("Seed set to 1\n").startswith("paral: ")
    assert option in text
    assert remedy in text
    assert sum(max(1, -(-len(line) // 80)) for line in text.splitlines()) <= 15


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command in the repository, and returns what it prints about its error."""
    monkeypatch.chdir(ROOT)

    def run(command: str, *arguments: str) -> str:
        fixed = ["--config", "configs/gpt.yaml", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        ended = run_paral(command, *(fixed if command == "fit" else []), *arguments)
        assert ended == 2 or isinstance(ended, str)
        return (ended if isinstance(ended, str) else "") + capsys.readouterr().err

    return run


@pytest.mark.parametrize(("config", "option", "remedy"), YAML, ids=lambda value: str(value)[:60])
def test_mistake_in_yaml(said, tmp_path: Path, config: dict[str, Any], option: str, remedy: str) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))

    check_is_short(said("fit", "--config", str(tmp_path / "wrong.yaml")), option, remedy)


@pytest.mark.parametrize(("arguments", "option", "remedy"), COMMAND_LINE)
def test_mistake_on_the_command_line(said, arguments: str, option: str, remedy: str) -> None:
    check_is_short(said(*arguments.split()), option, remedy)


@pytest.mark.parametrize("command", ["", "consolidate", "verify", "inspect", "strategies", "check", "doctor"])
def test_help_is_short(monkeypatch, capsys, command: str) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", "80")

    assert run_paral(*command.split(), "--help") in (None, 0)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
