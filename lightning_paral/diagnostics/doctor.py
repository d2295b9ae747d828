"""`paral doctor`: what a machine has, which strategies are ready on it, and whether its ranks can communicate."""

import logging
import multiprocessing
import os
import platform
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_paral._version import __version__
from lightning_paral.diagnostics.rank_pool import RankError, RankPool
from lightning_paral.engines.zero.offload import check_compiler, check_folder
from lightning_paral.engines.zero.options import PATH_VARIABLE
from lightning_paral.engines.zero.process import choose_accelerator, quiet_deepspeed
from lightning_paral.errors import ConfigurationError
from lightning_paral.registry import STRATEGIES
from lightning_paral.tested_versions import TESTED_VERSIONS, untested
from lightning_paral.text import format_bytes, format_seconds

_REDUCED_BYTES = 4 * 2**20
_INDENT, _WIDTH = 27, 80
"""Columns before what was found, and of a line."""

ALL, RANKS, ZERO, NVME = "paral_", "paral_(?!dp$)", "zero", "nvme"
"""Regular expressions of the names of all strategies, of those of several processes, of those on DeepSpeed, and of
those that offload to NVMe."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What was found about one part of a machine or of its software."""

    name: str
    found: str
    """What was found, in a few words."""
    state: Literal["ok", "note", "warning", "broken"] = "ok"
    """`note`: missing or limited. `warning`: a strategy lacks it, or it may fail. `broken`: a run would fail."""
    advice: str = ""
    """What to do: a command, or a sentence. Empty if nothing has to be done."""
    stops: str = ""
    """A regular expression of the names of the strategies that it keeps from running; empty if it stops none."""

    def __str__(self) -> str:
        """Return a row of 80 columns, with the advice below what was found."""
        wrap = textwrap.TextWrapper(_WIDTH - _INDENT, break_on_hyphens=False).wrap  # commands stay as they are typed
        lines = [*wrap(self.found), *wrap(self.advice)]
        return f"{self.state:<9}{self.name:<18}" + f"\n{' ' * _INDENT}".join(lines)


def broken(facts: Iterable[Fact]) -> list[str]:
    """Return the names of what is broken."""
    return [fact.name for fact in facts if fact.state == "broken"]


def lacks(facts: Iterable[Fact]) -> dict[str, list[str]]:
    """Return by the name of each strategy what keeps it from running on this machine."""
    stops = {fact.name: fact.stops for fact in facts if fact.stops}
    return {entry.name: [name for name, each in stops.items() if re.search(each, entry.name)] for entry in STRATEGIES}


def as_json(facts: Sequence[Fact]) -> dict[str, Any]:
    """Return facts, and what follows from them, as `json` can write them."""
    strategies = [{"name": name, "lacks": lacking} for name, lacking in lacks(facts).items()]
    return {"broken": broken(facts), "facts": [asdict(fact) for fact in facts], "strategies": strategies}


def conclusion(facts: Sequence[Fact]) -> str:
    """Return for the terminal which strategies are ready, what the others lack, and what is broken."""
    alike: dict[str, list[str]] = {}
    for name, lacking in lacks(facts).items():
        alike.setdefault(", ".join(lacking), []).append(name)
    ready = Fact(name="ready", found=", ".join(alike.pop("", ["no strategy"])))
    rows = [Fact(name="not ready", found=f"{', '.join(alike[each])} (no {each})", state="note") for each in alike]
    said = f"Broken: {', '.join(broken(facts))}." if broken(facts) else "Nothing is broken."
    return "\n".join(map(str, (ready, *rows, "", said)))


def examine(num_ranks: int, nvme_path: str | None) -> Iterator[Fact]:
    """Look at this machine, and all-reduce over ranks that are started here; yield each fact as soon as it is known.

    Args:
        num_ranks: the number of ranks.
        nvme_path: the folder for offload to NVMe, if there is one.
    """
    system = f"{platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    yield from (Fact(name="lightning_paral", found=__version__), Fact(name="Python", found=system))
    parts: dict[str, tuple[Callable[[], Fact], str]] = {
        **{name: (partial(version_fact, name), ZERO if name == "deepspeed" else ALL) for name in TESTED_VERSIONS},
        "CUDA": (cuda_fact, ""),
        "NVMe": (lambda: nvme_fact(nvme_path), NVME),
        "all-reduce": (lambda: all_reduce_fact(num_ranks), RANKS),
    }
    for name, (look, stops) in parts.items():
        try:
            fact = look()
        except Exception as error:  # on a machine unlike any that was seen
            found = f"could not be examined: {_first_line(error)}"
            fact = Fact(name=name, found=found, state="broken", stops=stops)
        yield fact


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def version_fact(name: str) -> Fact:
    """Return the version of a library, and for DeepSpeed whether it can be imported."""
    tested, stops = TESTED_VERSIONS[name], ZERO if name == "deepspeed" else ALL
    install = f"pip install '{name}{tested}'"
    try:
        found = metadata.version(name)
        if name == "deepspeed":
            choose_accelerator(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            with quiet_deepspeed(logging.ERROR):
                import_module(name)
    except Exception as error:  # DeepSpeed raises several kinds, for example if it finds half a CUDA toolkit
        is_missing = isinstance(error, metadata.PackageNotFoundError)
        found = "not installed" if is_missing else f"cannot be imported: {_first_line(error)}"
        return Fact(name=name, found=found, state="broken", advice=install, stops=stops)
    if untested(name) is not None:
        return Fact(name=name, found=f"{found} (untested: not {tested})", state="warning", advice=install)
    return Fact(name=name, found=f"{found} (tested: {tested})")


def nvme_fact(path: str | None) -> Fact:
    """Return whether a folder can be used for offload to NVMe, by an operator that a compiler makes."""
    if path is None:
        advice = f"export {PATH_VARIABLE}=/a/folder/on/a/local/disk"
        return Fact(name="NVMe", found=f"{PATH_VARIABLE} is not set", state="note", advice=advice, stops=NVME)
    try:
        check_folder(path)
        check_compiler("Offload")
    except ConfigurationError as error:
        return Fact(name="NVMe", found=f"{path} cannot be used", state="broken", advice=str(error), stops=NVME)
    return Fact(name="NVMe", found=f"{path}: direct I/O, {format_bytes(shutil.disk_usage(path).free)} free")


def cuda_fact() -> Fact:
    """Return the CUDA devices, or that torch has none although there is a driver."""
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        shown = ", ".join(f"{device.name} ({format_bytes(device.total_memory)})" for device in devices)
        return Fact(name="CUDA", found=f"{torch.version.cuda}: {shown}")
    if shutil.which("nvidia-smi") is None:
        return Fact(name="CUDA", found="no device", state="note")
    found = f"there is nvidia-smi, but torch, built for CUDA {torch.version.cuda}, finds no device"
    advice = "Install a build of torch for the CUDA that `nvidia-smi` prints. Look at CUDA_VISIBLE_DEVICES."
    return Fact(name="CUDA", found=found, state="warning", advice=advice)


def all_reduce_fact(num_ranks: int, seconds: float | None = None) -> Fact:
    """All-reduce over ranks that are started here, and return whether that works and how long it takes.

    Args:
        num_ranks: the number of ranks. They use NCCL if there is a CUDA device for each, else gloo.
        seconds: how long they may take after they have started; by default a minute, and a second more for each.
    """
    seconds = seconds or 60.0 + num_ranks
    is_cuda = torch.cuda.device_count() >= num_ranks and dist.is_nccl_available()
    what = f"{num_ranks} rank{'s' * (num_ranks != 1)}, {'NCCL on CUDA' if is_cuda else 'gloo on CPU'}"
    pool = RankPool("nccl" if is_cuda else "gloo", 2 * seconds)  # the pool knows better which rank is silent
    multiprocessing.set_forkserver_preload(["torch"])  # not DeepSpeed: if importing it fails, no rank would start
    try:
        taken = max(pool.run(num_ranks, _all_reduce, is_cuda, timeout=seconds))
    except RankError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        whys = [line for line in lines if re.match("rank .*[^:]$", line)] or lines[-1:]
        advice = (
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose a network interface; `ip -brief address` lists them. "
            "NCCL_DEBUG=INFO prints what NCCL does."
        )
        found = f"{what}: {'; '.join(whys)}"
        return Fact(name="all-reduce", found=found, state="broken", advice=advice, stops=RANKS)
    finally:
        pool.close()
    return Fact(name="all-reduce", found=f"{what}: {format_seconds(taken)} for {format_bytes(_REDUCED_BYTES)}")


def _all_reduce(is_cuda: bool) -> float:
    """Return the seconds of an all-reduce. *Collective* over the world."""
    group = dist.group.WORLD
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    tensor = torch.full((_REDUCED_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor, group=group)  # the first one connects
    if not bool((tensor == num_ranks * (num_ranks + 1) // 2).all()):
        raise RuntimeError("the all-reduce gave wrong values")
    start = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    if is_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
