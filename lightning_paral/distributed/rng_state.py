"""States of the global random number generators: captured, restored, and continued from a checkpoint."""

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


GlobalStates = tuple[Any, Any, Any]
"""States of the global generators of torch (CPU), numpy and `random`, in types that can be loaded safely."""


def global_states() -> GlobalStates:
    """Return the states of the global generators of torch (CPU), numpy and `random`."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    return torch.get_rng_state(), numpy_state, random.getstate()


def set_global_states(states: GlobalStates) -> None:
    """Set the global generators of torch (CPU), numpy and `random` to what `global_states` returned."""
    torch_state, numpy_state, python_state = states
    torch.set_rng_state(torch_state)
    _set_numpy_state(numpy_state)
    _set_python_state(python_state)


def _set_numpy_state(state: Any) -> None:
    kind, keys, *rest = state
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def _set_python_state(state: Any) -> None:
    version, internal, gauss = state
    random.setstate((version, tuple(internal), gauss))  # a list, after some ways of loading


def current_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of this rank for a checkpoint, in types that can be loaded safely.

    Args:
        devices: this rank's devices; other ranks save the states of theirs.
    """
    torch_state, numpy_state, python_state = global_states()
    states: dict[str, Any] = {"torch": torch_state, "python": python_state, "numpy": numpy_state}
    on_cuda = [device for device in devices if device.type == "cuda"]
    if on_cuda:
        states[CUDA] = [torch.cuda.get_rng_state(device) for device in on_cuda]
    return states


def restore_states(states: list[dict[str, Any]], ranks: RankGroup, devices: Sequence[torch.device]) -> None:
    """Set this rank's generators to their states in a checkpoint; do nothing if it was saved at another world size.

    Args:
        states: the states of all ranks that saved, ordered by rank.
        ranks: the ranks of this run.
        devices: this rank's devices. A device without a saved state, as after a run on CPU, keeps its own.
    """
    if len(states) != ranks.world_size:
        held = f"the random states of {len(states)} ranks" if states else "no random states"
        rank_zero_info(f"The checkpoint holds {held}, for {ranks.world_size} now: random numbers do not continue.")
        return
    mine = states[ranks.rank]
    torch.set_rng_state(mine["torch"])
    _set_python_state(mine["python"])
    if "numpy" in mine:  # earlier checkpoints lack it
        _set_numpy_state(mine["numpy"])
    for device, on_cuda in _by_device(mine, devices):
        torch.cuda.set_rng_state(on_cuda, device)


def without_cuda_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return `states` without those of CUDA devices, for ranks other than the one that saved them."""
    return {name: value for name, value in states.items() if name not in (CUDA, _ALL_VISIBLE)}


def _by_device(states: dict[str, Any], devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.Tensor]]:
    on_cuda = [device for device in devices if device.type == "cuda"]
    if CUDA in states:
        return list(zip(on_cuda, states[CUDA], strict=False))
    visible = states.get(_ALL_VISIBLE, [])
    return [(device, visible[device.index or 0]) for device in on_cuda if (device.index or 0) < len(visible)]
