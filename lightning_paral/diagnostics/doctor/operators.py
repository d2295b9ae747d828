"""What compiles DeepSpeed's operators for offload, and which of them are compiled."""

import os
import shutil
import subprocess
import sys
import sysconfig

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.diagnostics.doctor.versions import import_deepspeed
from lightning_paral.engines.zero.runtime.operators import check_compiler, operator_folder
from lightning_paral.errors import ConfigurationError

_SECONDS = 60
"""How long the compiler may take for a line."""


def operator_facts() -> list[Fact]:
    """Return the compiler, what it needs, and the operators. Imports DeepSpeed."""
    compiler = _compiler()
    return [
        compiler,
        _python_headers(),
        _libaio(compiler),
        _ninja(),
        *_operators(),
    ]


def _compiler() -> Fact:
    command = os.environ.get("CXX", "g++")
    path = shutil.which(command)
    if path is None:
        advice = "Unset CXX, or set it to a compiler." if "CXX" in os.environ else "apt-get install g++"
        return Fact(name="compiler", found=f"{command} not found", state="warning", advice=advice)
    error = _compile(path, "int main() { return 0; }\n")
    if error:
        advice = "apt-get install --reinstall g++"
        return Fact(name="compiler", found=f"{path} fails: {error}", state="warning", advice=advice)
    version = _first_line([path, "--version"])
    return Fact(name="compiler", found=version or path, data={"path": path})


def _python_headers() -> Fact:
    folder = sysconfig.get_path("include")
    if not os.path.isfile(os.path.join(folder, "Python.h")):
        advice = "apt-get install python3-dev"
        return Fact(name="Python headers", found=f"not in {folder}", state="warning", advice=advice)
    return Fact(name="Python headers", found="found", data={"path": folder})


def _libaio(compiler: Fact) -> Fact:
    if not compiler.is_ok:
        found = "cannot be found without a compiler"
        return Fact(name="libaio", found=found, state="warning", advice="apt-get install libaio-dev")
    try:
        check_compiler("the doctor", needs_aio=True)
    except ConfigurationError:
        advice = "apt-get install libaio-dev"
        return Fact(name="libaio", found="no library or header; only NVMe needs it", state="warning", advice=advice)
    return Fact(name="libaio", found="found, with its header")


def _ninja() -> Fact:
    path = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))  # as where it is used
    if path is None:
        return Fact(name="ninja", found="not found", state="warning", advice="pip install ninja")
    return Fact(name="ninja", found=_first_line([path, "--version"]) or path, data={"path": path})


def _operators() -> list[Fact]:
    names = ("cpu_adam", "async_io")
    try:
        import_deepspeed()
        from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

        builders = dict(zip(names, (CPUAdamBuilder(), AsyncIOBuilder()), strict=True))
    except Exception as error:  # it raises several kinds
        reason = (str(error).splitlines() or [""])[0]
        found = f"unknown: {type(error).__name__}: {reason}"
        return [Fact(name=f"operator {name}", found=found, state="warning") for name in names]
    facts = []
    for name, builder in builders.items():
        path = operator_folder(builder) / f"{builder.name}.so"
        if path.is_file():
            facts.append(Fact(name=f"operator {name}", found="compiled", data={"path": str(path)}))
        else:
            found = "compiled at first use, which takes minutes"
            facts.append(Fact(name=f"operator {name}", found=found, state="note", data={"path": str(path)}))
    return facts


def _compile(compiler: str, program: str) -> str:
    """Return the first line of the compiler's errors for `program`; an empty text if there are none."""
    command = [compiler, "-x", "c++", "-", "-o", os.devnull]
    try:
        done = subprocess.run(command, input=program, text=True, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.splitlines() or [f"status {done.returncode}"])[0]


def _first_line(command: list[str]) -> str:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (printed.splitlines() or [""])[0]
