"""The device of a rank of a benchmark."""

import os

import torch


def device_and_backend() -> tuple[torch.device, str]:
    """Return the device of this rank: a GPU, if each rank of this node has one of its own, otherwise the CPU."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device, "nccl"
    return torch.device("cpu"), "gloo"
