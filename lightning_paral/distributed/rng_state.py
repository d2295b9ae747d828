"""Random number generator states of each rank."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.distributed.agreement import RankGroup

CUDA = "cuda"
"""Key of the states of this rank's own CUDA devices, in their order."""
_ALL_VISIBLE = "torch.cuda"
"""Key in earlier checkpoints of the states of all CUDA devices visible to the process, by index."""


def current_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return this rank's states, in types that can be loaded safely.

    Args:
        devices: this rank's devices; other ranks save the states of theirs.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype="int64")), *rest),
    }
    on_cuda = [device for device in devices if device.type == "cuda"]
    if on_cuda:
        states[CUDA] = [torch.cuda.get_rng_state(device) for device in on_cuda]
    return states


def restore_states(states: list[dict[str, Any]], ranks: RankGroup, devices: Sequence[torch.device]) -> None:
    """Continue this rank's random numbers where they were. At another world size there is nothing to continue.

    Args:
        states: the states of all ranks that saved.
        ranks: the ranks of this run.
        devices: this rank's devices. Those without a saved state, as after a run on CPU, are left as they are.
    """
    if len(states) != ranks.world_size:
        held = f"the random states of {len(states)} ranks" if states else "no random states"
        rank_zero_info(f"The checkpoint holds {held}, for {ranks.world_size} now: random numbers do not continue.")
        return
    mine = states[ranks.rank]
    torch.set_rng_state(mine["torch"])
    version, state, gauss = mine["python"]
    random.setstate((version, tuple(state), gauss))
    if "numpy" in mine:
        kind, keys, *rest = mine["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    for device, on_cuda in _by_device(mine, devices):
        torch.cuda.set_rng_state(on_cuda, device)


def without_devices(states: dict[str, Any]) -> dict[str, Any]:
    """Return `states` without those of CUDA devices, for ranks other than the one that saved them."""
    return {name: value for name, value in states.items() if name not in (CUDA, _ALL_VISIBLE)}


def _by_device(states: dict[str, Any], devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.Tensor]]:
    on_cuda = [device for device in devices if device.type == "cuda"]
    if CUDA in states:
        return list(zip(on_cuda, states[CUDA], strict=False))
    visible = states.get(_ALL_VISIBLE, [])
    return [(device, visible[device.index or 0]) for device in on_cuda if (device.index or 0) < len(visible)]
