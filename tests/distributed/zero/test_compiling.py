"""DeepSpeed's operators are compiled once and kept for all environments; compilers end with the process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_paral.engines.zero.runtime.deepspeed import choose_accelerator
from lightning_paral.engines.zero.runtime.operators import operator_folder
from tests.compile_operators import skip_unless_compilable

RUN = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.ops.op_builder.builder import OpBuilder
from lightning_paral.engines.zero.runtime.operators import keep_operators

class Builder(OpBuilder):
    def __init__(self, source):
        super().__init__(name="answer")
        self.source = source

    def absolute_name(self):
        return "answer"

    def sources(self):
        return [self.source]

    def cxx_args(self):
        return ["-O0", "-fconstexpr-loop-limit=2147483647", "-fconstexpr-ops-limit=9000000000000000000"]

with keep_operators():
    print("answer:", Builder(sys.argv[1]).load(verbose=False).answer())
"""
QUICK = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "answer", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_answer() { return PyModule_Create(&definition); }
"""
NEVER_ENDING = """
constexpr long count() { long n = 0; while (n < 4000000000000) ++n; return n; }
static_assert(count() > 0);
"""


def start(source: Path, cache: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(cache), "CXX": "g++"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(source)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def compiling(cache: Path) -> list[int]:
    """Return the IDs of processes that compile in folders below `cache`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            folder = os.readlink(process / "cwd")
        except OSError:
            continue
        if folder.startswith(str(cache)) and Path(os.fsdecode(command[0])).name in ("cc1plus", "ninja"):
            found.append(int(process.name))
    return found


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for compilers in /proc")
def test_killed_run_ends_its_compilers_and_does_not_block_the_next(tmp_path: Path) -> None:
    skip_unless_compilable("cpu_adam")
    source, cache = tmp_path / "answer.cpp", tmp_path / "cache"
    source.write_text(NEVER_ENDING)
    killed = start(source, cache)
    try:
        wait_until(lambda: len(compiling(cache)) > 1 or killed.poll() is not None, 240)
        assert killed.poll() is None, "it ended before its compilers were seen"
        killed.send_signal(signal.SIGKILL)
        wait_until(lambda: not compiling(cache), 60)
    finally:
        killed.kill()
        for process in compiling(cache):
            os.kill(process, signal.SIGKILL)
        said, _ = killed.communicate(timeout=30)
    assert "Compiling DeepSpeed's operator 'answer', which takes" in said
    source.write_text(QUICK)
    for compiles in (True, False):
        said, _ = start(source, cache).communicate(timeout=240)
        assert "answer: 42" in said
        assert ("Compiling DeepSpeed's operator" in said) is compiles
    assert [path.name for path in cache.rglob("*") if path.is_file()] in (
        ["answer.so", "answer.turn"],
        ["answer.turn", "answer.so"],
    )


class Builder:
    name = "answer"


def test_operators_are_kept_by_versions_and_processor(monkeypatch, tmp_path: Path) -> None:
    choose_accelerator(torch.device("cpu"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = operator_folder(Builder())
    assert kept.parent == tmp_path / "lightning_paral" / "ops"
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    monkeypatch.setattr("deepspeed.__file__", "/another/environment/deepspeed/__init__.py")
    assert operator_folder(Builder()) == kept
    monkeypatch.setenv("CXX", "another-compiler")
    assert operator_folder(Builder()) != kept
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("deepspeed.__version__", "1.0")
    assert operator_folder(Builder()) != kept
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert operator_folder(Builder()).parent == tmp_path / "own" / "lightning_paral"
