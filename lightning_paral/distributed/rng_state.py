"""Capture and restore the states of the global random number generators."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.distributed.agreement import RankGroup

CUDA = "cuda"
"""Key of the states of a rank's own CUDA devices, in the order of the devices."""
_ALL_VISIBLE = "torch.cuda"
"""Key, in checkpoints of earlier versions, of the states of all CUDA devices visible to the process, by index."""

GlobalStates = tuple[Any, Any, Any]
"""States of the global generators of torch (CPU), numpy and `random`, in types that can be loaded safely."""


def global_states() -> GlobalStates:
    """Return the states of the global generators of torch (CPU), numpy and `random`."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (algorithm, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    return torch.get_rng_state(), numpy_state, random.getstate()


def set_global_states(states: GlobalStates) -> None:
    """Set the global generators of torch (CPU), numpy and `random` to the states that `global_states` returned."""
    torch_state, numpy_state, python_state = states
    torch.set_rng_state(torch_state)
    _set_numpy_state(numpy_state)
    _set_python_state(python_state)


def _set_numpy_state(state: Any) -> None:
    algorithm, keys, *rest = state
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))


def _set_python_state(state: Any) -> None:
    version, internal, gauss = state
    random.setstate((version, tuple(internal), gauss))  # loading may turn tuples into lists


def current_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the RNG states of this rank for a checkpoint, in types that can be loaded safely.

    Args:
        devices: the devices of this rank. Other ranks save the states of theirs.
    """
    torch_state, numpy_state, python_state = global_states()
    states: dict[str, Any] = {"torch": torch_state, "python": python_state, "numpy": numpy_state}
    on_cuda = [device for device in devices if device.type == "cuda"]
    if on_cuda:
        states[CUDA] = [torch.cuda.get_rng_state(device) for device in on_cuda]
    return states


def restore_states(states: list[dict[str, Any]], ranks: RankGroup, devices: Sequence[torch.device]) -> None:
    """Set this rank's generators to their states in a checkpoint; do nothing if the world size has changed.

    Args:
        states: the states of all ranks of the run that saved, ordered by rank.
        ranks: the ranks of this run.
        devices: the devices of this rank. A device without a saved state, as after a run on CPU, keeps its current one.
    """
    if len(states) != ranks.world_size:
        held = f"random states for a different number of ranks ({len(states)})" if states else "no random states"
        rank_zero_info(
            f"The checkpoint has {held}, so they are not restored: dropout masks and other random numbers differ from "
            "those of the uninterrupted run."
        )
        return
    local = states[ranks.rank]
    torch.set_rng_state(local["torch"])
    _set_python_state(local["python"])
    if "numpy" in local:  # checkpoints of earlier versions lack it
        _set_numpy_state(local["numpy"])
    for device, state in _cuda_states(local, devices):
        torch.cuda.set_rng_state(state, device)


def without_cuda_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return `states` without those of CUDA devices, for use on a rank other than the one that saved them."""
    return {name: value for name, value in states.items() if name not in (CUDA, _ALL_VISIBLE)}


def _cuda_states(states: dict[str, Any], devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.Tensor]]:
    on_cuda = [device for device in devices if device.type == "cuda"]
    if CUDA in states:
        return list(zip(on_cuda, states[CUDA], strict=False))
    visible = states.get(_ALL_VISIBLE, [])
    return [(device, visible[device.index or 0]) for device in on_cuda if (device.index or 0) < len(visible)]
