"""Every snippet of the documentation runs, in the order of the page."""

import os
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry

from lightning_paral import STRATEGIES
from lightning_paral.cli import main
from tests.docs.blocks import DOCS, HAND_WRITTEN, Block, Command, blocks_of, command_of
from tests.docs.calls import inline_calls, wrong_options

ROOT = DOCS.parent
RUN, LANGUAGES = ("python", "bash", "yaml"), {"python", "bash", "yaml", "text"}
WITH_CODE = [path for path in HAND_WRITTEN if any(block.language in RUN for block in blocks_of(path))]
SHORT = [f"--trainer.{name}=2" for name in ("max_steps", "val_check_interval")]
SHORT += ["--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0", "--trainer.accelerator=cpu"]
SHORT += ["--trainer.enable_progress_bar=false", "--model.init_args.num_layers=1"]
SHORT_CHECK = ["--steps=2", "--model.num_layers=1"]
NUM_RANKS = 2


def names(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def page(path: Path) -> Any:
    """Return a page as a parameter, marked with the operators that its snippets need."""
    text = "".join(block.text.lower() for block in blocks_of(path) if block.language in RUN and block.reason is None)
    return pytest.param(path, id=names(path), marks=[pytest.mark.deepspeed_operators] if "nvme" in text else [])


@pytest.fixture(scope="module")
def files_of_readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that readers are asked to save, and with those of the repository that commands name."""
    folder = tmp_path_factory.mktemp("reader")
    for path in WITH_CODE:
        for block in blocks_of(path):
            if block.title is not None:
                (folder / block.title).write_text(block.text)
    for name in ("configs", "examples", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.lane("full")
@pytest.mark.parametrize("path", map(page, WITH_CODE))
def test_snippets_and_commands_of_a_page_run(path: Path, on_ranks, files_of_readers: Path, tmp_path: Path) -> None:
    for file in files_of_readers.iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())

    for block in blocks_of(path):
        if block.reason is not None or block.language not in RUN:
            continue
        if block.language == "python":
            run_python(block, on_ranks, tmp_path)
        elif block.language == "yaml":
            check_yaml(block, tmp_path)
        else:
            for line in block.lines:
                run_command(command_of(line), on_ranks, tmp_path)


def run_python(block: Block, on_ranks, folder: Path) -> None:
    path = folder / (block.title or "snippet.py")
    if block.title is not None:
        compile(block.text, block.title, "exec")  # commands run it
        return
    path.write_text(block.text)
    if '"paral_dp"' in block.text:  # one process
        run_as_reader(str(folder), [str(path)], {})
    else:
        on_ranks(NUM_RANKS, run_as_reader, str(folder), [str(path)], {})


def run_command(command: Command, on_ranks, folder: Path) -> None:
    program, arguments, variables = command.program, command.arguments, command.variables
    if program == "pip":
        assert arguments[:3] == ["install", "-c", "constraints.txt"]  # CI installs so
    elif program == "python" and arguments[0] == "-m":
        with arranged(str(ROOT), arguments[1:], variables):
            runpy.run_module(arguments[1], run_name="__main__")
    elif program == "python":
        on_ranks(NUM_RANKS, run_as_reader, str(folder), [str(folder / arguments[0]), *arguments[1:]], variables)
    elif arguments[0] == "check":
        run_as_reader(str(folder), ["paral", *arguments, *SHORT_CHECK], variables)
    elif command.is_training:
        on_ranks(NUM_RANKS, run_as_reader, str(folder), ["paral", *arguments, *SHORT], variables)
    else:
        assert program == "paral"
        opened = (folder / command.output).open("w") if command.output else nullcontext(sys.stdout)
        with opened as file, redirect_stdout(file):
            run_as_reader(str(folder), ["paral", *arguments], variables)


def run_as_reader(folder: str, argv: list[str], variables: dict[str, str]) -> None:
    """Run `paral` or a script in `folder`, and wait for the other ranks."""
    with arranged(folder, argv, variables):
        if argv[0] == "paral":
            main()
        else:
            runpy.run_path(argv[0], run_name="__main__")
        if dist.is_initialized():
            dist.barrier()


@contextmanager
def arranged(folder: str, argv: list[str], variables: dict[str, str]) -> Iterator[None]:
    """Set up this process as if a reader had started it in `folder`."""
    sys.modules.pop("train", None)
    path = [folder, *sys.path]
    with chdir(folder), patch.dict(os.environ, variables), patch("sys.argv", argv), patch("sys.path", path):
        yield


def check_yaml(block: Block, folder: Path) -> None:
    """Parse a configuration with `paral`, on top of that of the example."""
    path = folder / "block.yaml"
    path.write_text(block.text)
    arguments = ["fit", "--config", "configs/gpt.yaml", "--config", str(path), "--print_config"]
    with pytest.raises(SystemExit) as end:
        run_as_reader(str(folder), ["paral", *arguments], {})
    assert end.value.code in (None, 0)


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=names)
def test_blocks_are_of_known_languages_and_options_exist(path: Path) -> None:
    for block in blocks_of(path):
        assert block.language in LANGUAGES
        if block.language == "python":
            assert not list(wrong_options(block.text)), block.text
        elif block.language == "bash":
            for line in block.lines:
                assert command_of(line).program in ("paral", "python", "pip", "pytest", "apt-get"), line
    for code in inline_calls(path.read_text()):
        assert not list(wrong_options(code)), code


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=names)
def test_names_of_strategies_exist(path: Path) -> None:
    text = path.read_text()
    ours = {entry.name for entry in STRATEGIES}
    examples = {
        name
        for example in (ROOT / "examples").glob("*.py")
        for name in re.findall(r'strategy_name = "(\w+)"', example.read_text())
    }
    theirs = {*StrategyRegistry.available_strategies(), "auto"}

    assert set(re.findall(r"\bparal_(?:dp|ddp|fsdp|zero)\w*", text)) <= {*ours, "paral_zero"}
    assert set(re.findall(r'\bstrategy="(\w+)"', text)) <= ours | theirs | examples


def test_marks_name_a_reason() -> None:
    marked = [block for path in HAND_WRITTEN for block in blocks_of(path) if block.reason is not None]
    num_marks = sum(path.read_text().count("<!-- not run") for path in HAND_WRITTEN)

    assert len(marked) == num_marks  # each is right before its block
    assert all(len(block.reason.split()) >= 3 for block in marked if block.reason)
