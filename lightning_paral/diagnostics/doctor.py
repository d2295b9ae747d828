"""`paral doctor`: what a machine has, which strategies are ready on it, and whether its ranks can communicate."""

import logging
import multiprocessing
import os
import re
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text
from torch.utils import collect_env

from lightning_paral._version import __version__
from lightning_paral.diagnostics.rank_pool import RankError, RankPool
from lightning_paral.engines.zero.options import PATH_VARIABLE
from lightning_paral.engines.zero.runtime.deepspeed import choose_accelerator, quiet_deepspeed
from lightning_paral.engines.zero.runtime.nvme import check_folder
from lightning_paral.engines.zero.runtime.operators import check_compiler, operator_folder
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.host_memory_check import available_bytes
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.registry import STRATEGIES, RegisteredStrategy
from lightning_paral.strategies.dp import ParalDPStrategy
from lightning_paral.strategies.zero import ParalZeROStrategy
from lightning_paral.tables import make_table
from lightning_paral.tested_versions import TESTED_VERSIONS, untested

_RANK_BYTES = 2**29
"""The host memory that a rank of the all-reduce needs: 0.3 GiB with torch's build for CPU, 0.41 with that for CUDA."""
_SMALL_BYTES, _LARGE_BYTES = 8, 4 * 2**20
"""Sizes of the fp32 tensors whose all-reduce gives the latency and the bandwidth."""
_SHARED_MEMORY, _MIN_SHARED = "/dev/shm", 2**30
_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "broken": "bold red"}


Stops = Literal["", "all", "ranks", "zero", "offload", "nvme"]
"""Strategies that cannot run: none, all, those of several processes, those on DeepSpeed, those that offload by it, and
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
    stops: Stops = ""
    """The strategies that it keeps from running."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers in `found`, for JSON: bytes, seconds, and bytes per second."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found."""

    facts: tuple[Fact, ...]
    environment: Mapping[str, Any]
    """What `python -m torch.utils.collect_env` finds, by its names."""

    @property
    def broken(self) -> list[str]:
        """The names of what is broken."""
        return [fact.name for fact in self.facts if fact.state == "broken"]

    def lacking(self, entry: RegisteredStrategy) -> list[Fact]:
        """Return what keeps a strategy from running on this machine."""
        kinds = {"all"} if issubclass(entry.strategy, ParalDPStrategy) else {"all", "ranks"}
        if issubclass(entry.strategy, ParalZeROStrategy):
            offloads = {entry.arguments.get(option) for option in ("offload_optimizer", "offload_parameters")} - {None}
            kinds |= {"zero"} | ({"offload"} if offloads else set()) | ({"nvme"} & offloads)
        return [fact for fact in self.facts if fact.stops in kinds]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that `json` can write."""
        strategies = [
            {"name": entry.name, "lacks": [fact.name for fact in lacking], "advice": [fact.advice for fact in lacking]}
            for entry in STRATEGIES
            for lacking in [self.lacking(entry)]
        ]
        facts = [asdict(fact) for fact in self.facts]
        return {"broken": self.broken, "facts": facts, "strategies": strategies, "environment": self.environment}

    def __rich__(self) -> RenderableType:
        """Return a table for 80 columns and more."""
        rows = [_row(fact.state, fact.name, fact.found, fact.advice) for fact in self.facts]
        alike: dict[tuple[str, ...], list[str]] = {}
        for entry in STRATEGIES:
            alike.setdefault(tuple(fact.name for fact in self.lacking(entry)), []).append(entry.name)
        advice = {fact.name: fact.advice for fact in self.facts}
        for lacks, names in sorted(alike.items()):  # those that lack nothing come first
            if lacks:
                lack = f"{', '.join(names)} lack{'s' * (len(names) == 1)} {', '.join(lacks)}"
                rows.append(_row("note", "not ready", lack, "\n".join(advice[name] for name in lacks)))
            else:
                rows.append(_row("ok", "ready", ", ".join(names), ""))
        said = Text("Nothing is broken.", "green")
        if self.broken:
            said = Text(f"Broken: {', '.join(self.broken)}.", "bold red")
        return Group(make_table(("", "", "found"), rows, left=(0, 1, 2)), said)


def _row(state: str, name: str, found: str, advice: str) -> tuple[str, str, str]:
    shown = escape(found) + (f"\n[bold]{escape(advice)}[/bold]" if advice else "")
    return f"[{_STYLES[state]}]{state}[/]", escape(name), shown


def examine(num_ranks: int, nvme_path: str | None, on_progress: Callable[[str], None] = lambda what: None) -> Report:
    """Look at this machine, and all-reduce over ranks that are started here.

    Args:
        num_ranks: the number of ranks.
        nvme_path: the folder for offload to NVMe, if there is one.
        on_progress: called with what is looked at next.

    Raises:
        ConfigurationError: there are no ranks, or too many for the memory of this machine.
    """
    if num_ranks < 1:
        raise ConfigurationError(f"--ranks {num_ranks} is not a number of ranks. Give 1 or more.")
    free = available_bytes()
    if free is not None and num_ranks * _RANK_BYTES > free:
        raise ConfigurationError(
            f"--ranks {num_ranks} needs {format_bytes(_RANK_BYTES)} of host memory for each rank, but "
            f"{format_bytes(free)} are available. Give at most {max(1, free // _RANK_BYTES)}, or end other programs."
        )
    environment: dict[str, Any] = {}
    facts: list[Fact] = []
    sections: dict[str, Callable[[], list[Fact]]] = {
        "environment": lambda: environment.update(collect_env.get_env_info()._asdict()) or [],  # type: ignore[no-untyped-call]
        "versions": lambda: version_facts(environment),
        "devices": lambda: device_facts(environment),
        "memory": memory_facts,
        "operators": operator_facts,
        "NVMe": lambda: [nvme_fact(nvme_path)],
        "network": lambda: network_facts(num_ranks),
    }
    for what, look in sections.items():
        on_progress(what)
        try:
            facts += look()
        except Exception as error:  # of a machine unlike any that was seen; the other facts matter all the more
            facts.append(Fact(name=what, found=f"could not be examined: {_first_line(error)}", state="warning"))
    return Report(facts=tuple(facts), environment=environment)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def version_facts(environment: Mapping[str, Any]) -> list[Fact]:
    """Return the versions of this package, Python and the libraries. Imports DeepSpeed.

    Args:
        environment: what `collect_env` has found.
    """
    python = f"{sys.version.split()[0]}, {environment.get('os')}"
    ours = [Fact(name="lightning_paral", found=__version__), Fact(name="Python", found=python)]
    return [*ours, *map(_version_fact, TESTED_VERSIONS)]


def _version_fact(name: str) -> Fact:
    tested = TESTED_VERSIONS[name]
    stops: Stops = "zero" if name == "deepspeed" else "all"
    install = f"pip install '{name}{tested}'"
    try:
        found = str(metadata.version(name))
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


def device_facts(environment: Mapping[str, Any]) -> list[Fact]:
    """Return the processor and the CUDA devices.

    Args:
        environment: what `collect_env` has found.
    """
    lines = (line.partition(":") for line in str(environment.get("cpu_info")).splitlines())
    model = next((value.strip() for name, _, value in lines if name.strip() == "Model name"), "unknown")
    found = f"{model}, {os.cpu_count()} cores; torch uses {torch.get_num_threads()}"
    processor = Fact(name="processor", found=found)
    driver, built = environment.get("nvidia_driver_version"), torch.version.cuda
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        shown = ", ".join(f"{device.name} ({format_bytes(device.total_memory)})" for device in devices)
        return [processor, Fact(name="CUDA", found=f"{built}, driver {driver}: {shown}")]
    if driver is None:
        return [processor, Fact(name="CUDA", found="no device", state="note")]
    found = f"driver {driver}, but torch, built for CUDA {built}, finds no device"
    advice = "Install a build of torch for the CUDA that `nvidia-smi` prints. Look at CUDA_VISIBLE_DEVICES."
    return [processor, Fact(name="CUDA", found=found, state="warning", advice=advice)]


def memory_facts() -> list[Fact]:
    """Return the memory of the host, of a container if it has less, and the memory that its processes can share."""
    virtual = psutil.virtual_memory()
    free = available_bytes() or virtual.available
    host = Fact(name="host memory", found=f"{format_bytes(free)} available of {format_bytes(virtual.total)}")
    if not os.path.isdir(_SHARED_MEMORY):
        return [host]
    shared = shutil.disk_usage(_SHARED_MEMORY).free
    found = f"{format_bytes(shared)} free"
    if shared >= _MIN_SHARED:
        return [host, Fact(name=_SHARED_MEMORY, found=found)]
    found += "; workers of a DataLoader and NCCL may need more"
    advice = "For Docker: docker run --shm-size=8g, or --ipc=host"
    return [host, Fact(name=_SHARED_MEMORY, found=found, state="warning", advice=advice)]


def network_facts(num_ranks: int, seconds: float | None = None) -> list[Fact]:
    """All-reduce over ranks that are started here; return how fast that is, and the interfaces that they use.

    Args:
        num_ranks: the number of ranks. They use NCCL if there is a CUDA device for each, else gloo.
        seconds: how long they may take after they have started; by default a minute, and a second more for each.
    """
    interfaces = _interfaces()
    shown = ", ".join(f"{name} {addresses[0]}" for name, addresses in interfaces.items())
    facts = [Fact(name="interfaces", found=shown or "none is up")]
    is_cuda = torch.cuda.device_count() >= num_ranks and dist.is_nccl_available()
    what = f"{num_ranks} rank{'s' * (num_ranks != 1)}, {'NCCL on CUDA' if is_cuda else 'gloo on CPU'}"
    try:
        addresses, latency, bandwidth = _all_reduce_here(num_ranks, is_cuda, seconds or 60.0 + num_ranks)
    except RankError as error:
        lines = str(error).splitlines()
        what += f": {'; '.join(line for line in lines if re.match('rank .*[^:]$', line)) or lines[-1]}"
        advice = "Look at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. NCCL_DEBUG=INFO prints what NCCL does."
        return [*facts, Fact(name="all-reduce", found=what, state="broken", advice=advice, stops="ranks")]
    what += f": {format_seconds(latency)} for 8 bytes, {format_bytes(bandwidth)}/s for 4 MiB"
    numbers = {"ranks": num_ranks, "latency": latency, "bandwidth": bandwidth}
    facts.append(Fact(name="all-reduce", found=what, numbers=numbers))
    return facts + [_backend_fact(name, used, interfaces) for name, used in addresses.items()]


def _all_reduce_here(num_ranks: int, is_cuda: bool, seconds: float) -> tuple[dict[str, set[str]], float, float]:
    """Return the addresses that rank 0 uses, by backend, and latency and bandwidth on the slowest rank."""
    pool = RankPool(timeout=2 * seconds)  # waits longer than this process, which knows better which rank is silent
    multiprocessing.set_forkserver_preload(["torch"])  # not DeepSpeed: if importing it fails, no rank would start
    try:
        ranks = pool.run(num_ranks, _all_reduce, is_cuda, timeout=seconds)
    finally:
        pool.close()
    small, large = (max(taken[index] for _, taken in ranks) for index in (0, 1))
    return ranks[0][0], small, _LARGE_BYTES / large


def _all_reduce(is_cuda: bool) -> tuple[dict[str, set[str]], list[float]]:
    addresses, group, device = {"gloo": _own_addresses()}, dist.group.WORLD, torch.device("cpu")
    if is_cuda:
        device = torch.device("cuda", dist.get_rank(group))
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    taken = [_time(size // 4, group, device) for size in (_SMALL_BYTES, _LARGE_BYTES)]
    if is_cuda:
        addresses["NCCL"] = _own_addresses() - addresses["gloo"]
    return addresses, taken


def _own_addresses() -> set[str]:
    connections = psutil.Process().connections("inet")  # from psutil 6 on also called net_connections
    return {each.laddr.ip for each in connections if each.laddr}


def _time(numel: int, group: Any, device: torch.device, repeats: int = 10) -> float:
    """Return the seconds of an all-reduce. *Collective* over `group`."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    tensor = torch.full((numel,), float(rank + 1), device=device)
    dist.all_reduce(tensor, group=group)  # the first one connects
    if not bool((tensor == num_ranks * (num_ranks + 1) // 2).all()):
        raise RuntimeError(f"the all-reduce of {4 * numel:,} bytes gave wrong values")
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _interfaces() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of the network interfaces that are up."""
    states, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [each.address for each in addresses if each.family in families and "%" not in each.address]  # link-local
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _backend_fact(backend: str, used: set[str], interfaces: Mapping[str, list[str]]) -> Fact:
    chosen = [name for name, addresses in interfaces.items() if set(used) & set(addresses)]
    others = [name for name in interfaces if name not in chosen]
    found = f"uses {', '.join(chosen or used) or 'no interface'}"
    if not (others and used and all(address == "::1" or address.startswith("127.") for address in used)):
        return Fact(name=backend, found=found)
    found += ", which reaches this machine only. Several nodes need another interface."
    advice = f"export {backend.upper()}_SOCKET_IFNAME={others[0]}"
    return Fact(name=backend, found=found, state="note", advice=advice)


def operator_facts() -> list[Fact]:
    """Return what compiles DeepSpeed's operators for offload, and whether they are compiled. May import DeepSpeed."""
    compiler, install = os.environ.get("CXX", "g++"), "apt-get install g++"
    if "CXX" in os.environ:
        install = "Unset CXX, or set it to a compiler."
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    ninja = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))  # as where it is used
    compiled = {name: _is_compiled(name) for name in ("cpu_adam", "async_io")}
    stops: Stops = "" if all(compiled.values()) else "nvme" if compiled["cpu_adam"] else "offload"
    found = {True: "compiled", False: "compiled at first use, which takes minutes"}
    return [
        _tool("compiler", shutil.which(compiler), f"{compiler} not found", install, "offload"),
        _tool("libaio", _libaio(), "no library or header; only NVMe needs it", "apt-get install libaio-dev", "nvme"),
        _tool(
            "Python headers", headers * os.path.isfile(headers), f"no {headers}", "apt-get install python3-dev", stops
        ),
        _tool("ninja", ninja, "not found", "pip install ninja", stops),
        *(Fact(name=f"operator {name}", found=found[is_compiled]) for name, is_compiled in compiled.items()),
    ]


def _tool(name: str, found: str | None, missing: str, advice: str, stops: Stops) -> Fact:
    if found:
        return Fact(name=name, found=found)
    return Fact(name=name, found=missing, state="warning", advice=advice, stops=stops)


def _libaio() -> str:
    try:
        check_compiler("the doctor", needs_aio=True)
    except ConfigurationError:
        return ""
    return "found, with its header"


def _is_compiled(name: str) -> bool:
    try:
        builders = import_module("deepspeed.ops.op_builder")
    except Exception:  # of several kinds; the versions say why
        return False
    builder = builders.CPUAdamBuilder() if name == "cpu_adam" else builders.AsyncIOBuilder()
    return (operator_folder(builder) / f"{builder.name}.so").is_file()


def nvme_fact(path: str | None) -> Fact:
    """Return whether a folder can be used for offload to NVMe, and how much is free."""
    if path is None:
        advice = f"export {PATH_VARIABLE}=/a/folder/on/a/local/disk"
        return Fact(name="NVMe", found=f"{PATH_VARIABLE} is not set", state="note", advice=advice, stops="nvme")
    try:
        check_folder(path)
    except ConfigurationError as error:
        return Fact(name="NVMe", found=f"{path} cannot be used", state="broken", advice=str(error), stops="nvme")
    free = shutil.disk_usage(path).free
    return Fact(name="NVMe", found=f"{path}: direct I/O, {format_bytes(free)} free", numbers={"free": free})
