"""DeepSpeed's operators are compiled once and kept for all environments; compilers end with the process, or in time."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_paral.engines.zero import offload as operators
from lightning_paral.engines.zero.offload import load_operators, operator_folder
from lightning_paral.engines.zero.process import choose_accelerator
from lightning_paral.errors import ConfigurationError

RUN = """
from lightning_paral.engines.zero.offload import load_operators
load_operators("the test")
"""


@pytest.fixture
def endless_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Set a compiler that never ends a compilation, and no loaded operators; return a function that counts those."""
    choose_accelerator(torch.device("cpu"))
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops", {})
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase " $* " in *" -c "*) sleep 3210.5;; *) exec g++ "$@";; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def count() -> int:
        commands = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                commands.append(file.read_bytes().split(b"\0"))
            except OSError:
                continue
        return sum(str(compiler).encode() in command and b"-c" in command for command in commands)

    return count


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for compilers in /proc")
def test_killed_run_ends_its_compilers_and_does_not_block_the_next(endless_compiler, monkeypatch) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=os.getcwd()
    )
    try:
        wait_until(lambda: endless_compiler() > 1 or killed.poll() is not None, 240)  # they compile side by side
        assert killed.poll() is None, "it ended before its compilers were seen"
    finally:
        killed.kill()
        said, _ = killed.communicate(timeout=30)
    wait_until(lambda: endless_compiler() == 0, 60)
    assert "Compiling DeepSpeed's operators pin_memory, async_io, which takes" in said
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(ConfigurationError, match=r"(?s)ninja.* no CUDA toolkit. Fix the error.*leave out offload"):
        load_operators("offload")


def test_compilers_that_take_too_long_are_ended(endless_compiler, monkeypatch) -> None:
    monkeypatch.setattr(operators, "_MAX_SECONDS", 0.5)
    with pytest.raises(ConfigurationError, match="pin_memory, async_io, which offload needs, were not compiled within"):
        load_operators("offload")
    wait_until(lambda: endless_compiler() == 0, 10)


def test_operator_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose_accelerator(torch.device("cpu"))
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file = operator_folder() / "pin_memory.so"
    file.parent.mkdir(parents=True)
    for each in (file, file.with_name("async_io.so")):
        each.write_bytes(b"not a library")
    with pytest.raises(
        ConfigurationError, match=f"'pin_memory', which offload needs, .* Delete {re.escape(str(file))} to"
    ):
        load_operators("offload")


def test_operators_are_kept_by_versions_and_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose_accelerator(torch.device("cpu"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = operator_folder()
    assert kept.parent == tmp_path / "lightning_paral" / "ops"
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    monkeypatch.setattr("deepspeed.__file__", "/another/environment/deepspeed/__init__.py")
    assert operator_folder() == kept
    monkeypatch.setattr("deepspeed.__version__", "1.0")
    assert operator_folder() != kept
    monkeypatch.setattr(operators, "_processor", lambda: "another")
    assert operator_folder().name[:-13] == f"torch-{torch.__version__}-deepspeed-1.0"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert operator_folder().parent == tmp_path / "own" / "lightning_paral"
