"""Versions of Python and of the packages, and whether they are in the tested range."""

import logging
import platform
from importlib import import_module, metadata

import torch

from lightning_paral._version import __version__
from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.engines.zero.runtime.deepspeed import choose_accelerator, quiet_deepspeed
from lightning_paral.tested_versions import TESTED_VERSIONS, untested


def version_facts() -> list[Fact]:
    """Return the versions of Python, this package, torch, Lightning and DeepSpeed. Imports DeepSpeed."""
    return [
        Fact(name="lightning_paral", found=__version__),
        Fact(name="Python", found=f"{platform.python_version()}, {_system()}"),
        *map(_package, TESTED_VERSIONS),
    ]


def _system() -> str:
    return f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"


def _package(name: str) -> Fact:
    tested = TESTED_VERSIONS[name]
    install = f"pip install '{name}{tested}'"
    try:
        installed = str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return Fact(name=name, found="not installed", state="broken", advice=install, data={"tested": tested})
    data = {"version": installed, "tested": tested}
    try:
        if name == "deepspeed":
            import_deepspeed()
        else:
            import_module(name)
    except Exception as error:  # DeepSpeed raises several kinds, for example if it finds half a CUDA toolkit
        reason = (str(error).splitlines() or [""])[0]
        found = f"{installed} cannot be imported: {type(error).__name__}: {reason}"
        return Fact(name=name, found=found, state="broken", advice=install, data=data)
    if untested(name) is not None:
        return Fact(
            name=name, found=f"{installed} (untested: not {tested})", state="warning", advice=install, data=data
        )
    return Fact(name=name, found=f"{installed} (tested: {tested})", data=data)


def import_deepspeed() -> None:
    """Import DeepSpeed for CUDA if there is a device, else for the CPU, without its messages."""
    choose_accelerator(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with quiet_deepspeed(logging.ERROR):
        import_module("deepspeed")
