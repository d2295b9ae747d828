"""The processor, the CUDA devices and NCCL."""

import os
import platform
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.quantities import format_bytes

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def device_facts() -> list[Fact]:
    """Return what computes on this machine, and NCCL."""
    return [_processor(), _cuda(), _nccl()]


def _processor() -> Fact:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{_processor_name()}, {cores} core{'s' * (cores != 1)}; torch uses {threads} thread{'s' * (threads != 1)}"
    return Fact(name="processor", found=found, data={"cores": cores, "torch_threads": threads})


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cuda() -> Fact:
    built = torch.version.cuda
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        counted = Counter((device.name, device.total_memory) for device in devices)
        shown = ", ".join(f"{number} x {name} ({format_bytes(size)})" for (name, size), number in counted.items())
        data = [{"name": device.name, "memory": device.total_memory} for device in devices]
        return Fact(name="CUDA", found=f"{built}: {shown}", data={"version": built, "devices": data})
    if not _NVIDIA_DRIVER.exists():
        found = "no device" if built else "no device; torch is built without CUDA"
        return Fact(name="CUDA", found=found, state="note", data={"version": built, "devices": []})
    if built is None:
        found, advice = "there is an NVIDIA driver, but torch is built without CUDA", "Install the CUDA build of torch."
    else:
        found = f"there is an NVIDIA driver, but torch, built for CUDA {built}, finds no device"
        advice = "Look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`: the driver may be too old for this CUDA."
    return Fact(name="CUDA", found=found, state="warning", advice=advice, data={"version": built, "devices": []})


def _nccl() -> Fact:
    if dist.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return Fact(name="NCCL", found=version, data={"version": version})
    if torch.cuda.is_available():
        advice = "Install torch's own wheel, which has NCCL."
        return Fact(name="NCCL", found="not in this build of torch", state="broken", advice=advice)
    return Fact(name="NCCL", found="not in this build of torch; only CUDA needs it", state="note")
