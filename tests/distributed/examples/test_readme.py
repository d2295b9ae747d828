"""Every command and every snippet of the README runs and does what the text says."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_paral import STRATEGIES
from lightning_paral.diagnostics.check import DEFAULT
from tests.benchmarks.measure import BENCHMARKS
from tests.launching import outputs

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
FIRST = [language for language, _ in BLOCKS].index("python") + 1
"""The number of blocks up to the first snippet."""
COMMANDS = [
    command.strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    for command in line.split("&&")
]
INSTALLS = [command for command in COMMANDS if command.startswith("pip install")]
CHECK = "paral check --config configs/gpt.yaml"
PLAN = "paral plan --config configs/gpt.yaml --world-size 8 --device-memory 80GiB"
TRAININGS = [command for command in COMMANDS if " fit " in command and "--ckpt_path" not in command]
ON_CHECKPOINTS = [command for command in COMMANDS if ".ckpt" in command]
SHORT = (
    "--trainer.max_steps=2 --trainer.val_check_interval=2 --trainer.limit_val_batches=1 "
    "--trainer.num_sanity_val_steps=1 --trainer.accelerator=cpu --model.init_args.num_layers=1"
)


@pytest.fixture
def run(launch) -> Any:
    """A function that runs a command and returns its output."""

    def run(command: list[str], **options: Any) -> str:
        program, *arguments = command
        process = launch(*arguments, by=(program,), **options)
        (printed,) = outputs(process)
        assert process.returncode == 0, printed
        return str(printed)

    return run


def test_every_command_is_accounted_for() -> None:
    others = set(COMMANDS) - set(INSTALLS) - set(TRAININGS) - set(ON_CHECKPOINTS)

    assert others == {"pytest", CHECK, PLAN}
    assert {language for language, _ in BLOCKS} <= {"bash", "python", "yaml"}


def test_install_for_development_is_the_one_ci_runs() -> None:
    (for_development,) = set(INSTALLS) - {"pip install ."}

    assert for_development.removeprefix("pip install ") in (ROOT / ".ci/run").read_text()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_table_has_every_strategy() -> None:
    named = re.findall(r"^\| `(paral_\w+)` \|", README, flags=re.MULTILINE)

    assert named == [entry.name for entry in STRATEGIES]


def test_measurements_name_commands_that_are_measured() -> None:
    commands = re.findall(r"^\|.*\|.*\| `((?:paral|python|torchrun) .*)` \|$", README, flags=re.MULTILINE)
    measured = {line for lines in BENCHMARKS.values() for line in lines}

    assert commands
    assert set(commands) <= measured


@pytest.mark.lane("full")
@pytest.mark.parametrize("command", [pytest.param(TRAININGS[0], marks=pytest.mark.lane("default")), *TRAININGS[1:]])
def test_training_command(run, command: str, tmp_path: Path) -> None:
    printed = run([*shlex.split(command), *SHORT.split(), f"--trainer.default_root_dir={tmp_path}"])

    assert "step 2: validation loss" in printed
    assert "max_steps=2` reached" in printed


def test_strategies_are_listed_and_planned(run) -> None:
    assert "paral_ddp_ring" in run(shlex.split("paral strategies"))
    assert 'Use strategy="paral_ddp"' in run(shlex.split(PLAN))


def test_check_finds_no_difference(run) -> None:
    printed = run([*shlex.split(CHECK), "--steps", "2", "--model.num_layers", "1"])

    assert re.findall(r"^ (paral_\w+) +equal ", printed, flags=re.MULTILINE) == list(DEFAULT)


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(BLOCKS[:FIRST], marks=pytest.mark.lane("default"), id="the first"),
        pytest.param(BLOCKS[FIRST:], marks=pytest.mark.lane("full"), id="others"),
    ],
)
def test_snippets_and_commands_on_checkpoints_run_in_the_order_they_are_read(run, tmp_path: Path, blocks: Any) -> None:
    for number, (language, text) in enumerate(blocks):
        if language == "python":
            (tmp_path / f"snippet_{number}.py").write_text(text)
            run([sys.executable, f"snippet_{number}.py"], cwd=tmp_path)
        elif language == "bash":
            for command in text.splitlines():
                if command in ON_CHECKPOINTS:
                    run_on_checkpoint(run, command, tmp_path)


def run_on_checkpoint(run: Any, command: str, folder: Path) -> None:
    program, *words = shlex.split(command)
    words = [str(folder / word) if word.endswith(".ckpt") else word for word in words]
    if " fit " not in command:
        run([program, *words])
        return
    options = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu"]
    printed = run([program, *words, *options, f"--trainer.default_root_dir={folder}"])
    assert "Restored all states" in printed
    assert "max_steps=3` reached" in printed


def test_yaml_equals_the_overlay() -> None:
    (shown,) = [text for language, text in BLOCKS if language == "yaml"]

    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "configs/strategies/ddp_ring.yaml").read_text())
