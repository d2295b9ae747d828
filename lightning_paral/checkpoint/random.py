"""The states of random number generators, of each rank its own."""

from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.checkpoint.ranks import Ranks


def current_states() -> dict[str, Any]:
    """Return this rank's states, in types that can be loaded safely."""
    states = _collect_rng_states(include_cuda=torch.cuda.is_available())
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def restore_states(states: list[dict[str, Any]], ranks: Ranks) -> None:
    """Continue this rank's random numbers where they were. At another world size there is nothing to continue."""
    if len(states) != ranks.world_size:
        held = f"the random states of {len(states)} ranks" if states else "no random states"
        rank_zero_info(f"The checkpoint holds {held}, for {ranks.world_size} now: random numbers do not continue.")
        return
    mine = dict(states[ranks.rank])
    if "numpy" in mine:
        kind, keys, *rest = mine["numpy"]
        mine["numpy"] = (kind, keys.numpy().astype("uint32"), *rest)
    if not torch.cuda.is_available():
        mine.pop("torch.cuda", None)
    _set_rng_states(mine)
