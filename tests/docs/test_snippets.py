"""Every snippet of the documentation runs, in the order of the page."""

import os
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

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
SHORT = [
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--model.init_args.num_layers=1",
]
NUM_RANKS = 2


def names(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


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


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_CODE, ids=names)
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
    if block.title is None:
        path.write_text(block.text)
    else:
        compile(block.text, block.title, "exec")  # commands run it
        return
    if '"paral_dp"' in block.text:  # one process
        run_script(str(folder), str(path), [], {})
    else:
        on_ranks(NUM_RANKS, run_script, str(folder), str(path), [], {})


def run_command(command: Command, on_ranks, folder: Path) -> None:
    if command.program == "pip":
        assert command.arguments[:3] == ["install", "-c", "constraints.txt"]  # CI installs so
    elif command.program == "python" and command.arguments[0] != "-m":
        script, *arguments = command.arguments
        on_ranks(NUM_RANKS, run_script, str(folder), str(folder / script), arguments, command.variables)
    elif command.program == "python":
        with arranged(str(ROOT), command.arguments[1:], command.variables):
            runpy.run_module(command.arguments[1], run_name="__main__")
    elif command.is_training:
        on_ranks(NUM_RANKS, run_paral, str(folder), [*command.arguments, *SHORT], command.variables)
    elif command.output is not None:
        with (folder / command.output).open("w") as file, redirect_stdout(file):
            run_paral(str(folder), command.arguments, command.variables)
    else:
        assert command.program == "paral"
        run_paral(str(folder), command.arguments, command.variables)


def run_script(folder: str, path: str, arguments: list[str], variables: dict[str, str]) -> None:
    with arranged(folder, [path, *arguments], variables):
        runpy.run_path(path, run_name="__main__")
        wait_for_other_ranks()


def run_paral(folder: str, arguments: list[str], variables: dict[str, str]) -> None:
    with arranged(folder, ["paral", *arguments], variables):
        main()
        wait_for_other_ranks()


def wait_for_other_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def arranged(folder: str, argv: list[str], variables: dict[str, str]) -> Iterator[None]:
    """Set up this process as if a reader had started it in `folder`."""
    before = sys.argv, os.getcwd(), dict(os.environ), list(sys.path)
    sys.argv, sys.path[:0] = argv, [folder]
    os.chdir(folder)
    os.environ.update(variables)
    sys.modules.pop("train", None)
    try:
        yield
    finally:
        sys.argv, cwd, environment, sys.path[:] = before
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)


def check_yaml(block: Block, folder: Path) -> None:
    """Parse a configuration with `paral`, on top of that of the example."""
    path = folder / "block.yaml"
    path.write_text(block.text)
    arguments = ["fit", "--config", "configs/gpt.yaml", "--config", str(path), "--print_config"]
    with pytest.raises(SystemExit) as end:
        run_paral(str(folder), arguments, {})
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
        name for path in (ROOT / "examples").glob("*.py") for name in re.findall(r' name="(\w+)"', path.read_text())
    }
    theirs = {*StrategyRegistry.available_strategies(), "auto"}

    assert set(re.findall(r"\bparal_(?:dp|ddp|fsdp|zero)\w*", text)) <= {*ours, "paral_zero"}
    assert set(re.findall(r'\bstrategy="(\w+)"', text)) <= ours | theirs | examples


def test_marks_name_a_reason() -> None:
    marked = [block for path in HAND_WRITTEN for block in blocks_of(path) if block.reason is not None]
    num_marks = sum(path.read_text().count("<!-- not run") for path in HAND_WRITTEN)

    assert len(marked) == num_marks  # each is right before its block
    assert all(len(block.reason.split()) >= 3 for block in marked if block.reason)
