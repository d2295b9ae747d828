"""Report the hardware and software of this machine, and whether the process groups of the strategies work on it."""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

PACKAGES = ("torch", "lightning", "torchmetrics", "deepspeed", "transformers", "jsonargparse", "numpy", "xxhash")
_AIO = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"


def versions(device: str) -> dict[str, Any]:
    """Report versions, compilers, devices, memory and disk."""
    facts: dict[str, Any] = {"failures": [], "python": platform.python_version()}
    for name in PACKAGES:
        facts[name] = metadata.version(name) if importlib.util.find_spec(name) else "missing"
    facts["CUDA of torch"] = torch.version.cuda
    facts["nvcc"] = _said(["nvcc", "--version"])
    facts["CUDA_HOME"] = os.environ.get("CUDA_HOME", "unset")
    facts["g++"] = _said(["g++", "--version"], line=0)
    facts["libaio"] = _has_libaio()
    facts["driver"] = _said(["nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader"])
    facts["cores"] = os.cpu_count()
    facts["host memory, GB"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    facts["disk free, GB"] = round(shutil.disk_usage(tempfile.gettempdir()).free / 1e9, 1)
    facts["interfaces"] = [name for _, name in socket.if_nameindex()]
    if device == "cuda":
        if not torch.cuda.is_available():
            facts["failures"].append("torch sees no GPU")
            return facts
        properties = torch.cuda.get_device_properties(0)
        facts["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()}"
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def process_group(device: str, bound: bool) -> dict[str, Any]:
    """Measure the seconds to make a group of one rank and a subgroup, for a barrier and a reduction, and to end it.

    Args:
        device: `"cuda"` or `"cpu"`.
        bound: whether to bind the group to the device, by `init_process_group(device_id=...)`.
    """
    facts: dict[str, Any] = {"failures": []}
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    group: Any = None
    tensor = torch.ones(1000, device=place)

    def make() -> None:
        dist.init_process_group(
            backend,
            store=store,
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=40),
            device_id=place if bound and device == "cuda" else None,
        )

    def make_another() -> None:
        nonlocal group
        group = dist.new_group([0])

    steps = {
        "init": make,
        "new_group": make_another,
        "reduce": lambda: dist.all_reduce(tensor),
        "reduce in the new group": lambda: dist.all_reduce(tensor, group=group),
        "barrier": dist.barrier,
        "destroy": dist.destroy_process_group,
    }
    for name, step in steps.items():
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        facts[name] = round(time.perf_counter() - began, 3)
    if tensor.sum().item() != 1000:
        facts["failures"].append("a reduction over one rank changed the tensor")
    return facts


def build_operators(device: str) -> dict[str, Any]:
    """Compile DeepSpeed's operators for offload, or find them compiled."""
    from tests.gpu.place import check_installed

    check_installed("paral_zero")
    from lightning_paral.engines.zero.runtime.deepspeed import choose_accelerator
    from lightning_paral.engines.zero.runtime.operators import load_operator

    choose_accelerator(torch.device(device))
    facts: dict[str, Any] = {"failures": []}
    for name in ("cpu_adam", "async_io"):
        began = time.perf_counter()
        try:
            load_operator(name, "tests.gpu")  # type: ignore[arg-type]
            facts[name] = f"{time.perf_counter() - began:.1f} s"
        except Exception as error:
            facts["failures"].append(f"{name}: {type(error).__name__}: {str(error)[-1500:]}")
    return facts


def _said(command: list[str], line: int = -1) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[line] if lines else f"code {done.returncode}"


def _has_libaio() -> bool:
    command = ["g++", "-x", "c++", "-", "-o", os.devnull, "-laio"]
    try:
        return subprocess.run(command, input=_AIO, text=True, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
