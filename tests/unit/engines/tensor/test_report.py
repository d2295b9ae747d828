"""What `paral plan --tensor-parallel` prints, and what it reads from a configuration and a Trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_paral.cli.plan import plan_command

ROOT = Path(__file__).parents[4]


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)

    plan_command(["--config", "configs/gpt.yaml", "--tensor-parallel", "4"])

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "How 4 tensor ranks divide GPT:" in lines
    assert "byte_embedding 1 vocab" in lines
    assert "blocks.*.query_key_value 4 colwise" in lines
    assert "blocks.*.feed_forward.1 4 colwise" in lines
    assert "blocks.*.feed_forward.3 4 rowwise" in lines
    assert "position_embedding 1 whole it has only 128 rows" in lines


def layers_in_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    plan_command(["--config", str(ROOT / "configs/gpt.yaml"), "--tensor-parallel", "2", "--json", *options])
    printed = json.loads(capsys.readouterr().out)
    assert printed["tensor_parallel"] == 2
    return {row["name"]: row for row in printed["layers"]}


def test_command_reads_the_plan_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    options = {"tensor_parallel": 2, "plan": {"head": "vocab"}}
    strategy = {"class_path": "lightning_paral.ParalFSDPStrategy", "init_args": options}
    (tmp_path / "tensor.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))

    layers = layers_in_json(capsys, "--config", str(tmp_path / "tensor.yaml"))

    assert [name for name, row in layers.items() if row["style"] != "whole"] == ["head"]
