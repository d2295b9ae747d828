"""Capture and restore the states of the global random number generators, and draw a rank's own numbers from them."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.distributed.exchange import RankGroup

CUDA = "cuda"
"""Key of the states of a rank's own CUDA devices, in the order of the devices."""

GlobalStates = tuple[Any, Any, Any]
"""States of the global generators of torch (CPU), numpy and `random`, in types that can be loaded safely."""

MAX_NUMPY_SEED = 2**32
_NUMPY: Any = np.random
_OWN_OF_NUMPY = np.random.MT19937()
"""Takes the place of numpy's global generator, because getting its state takes longer than the rest."""
_shared: list[Callable[[], None]] = []
"""While `own_numbers` are drawn, what returns to those before."""


def global_states() -> GlobalStates:
    """Return the states of the global generators of torch (CPU), numpy and `random`."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (algorithm, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    return torch.get_rng_state(), numpy_state, random.getstate()


def set_global_states(states: GlobalStates) -> None:
    """Set the global generators of torch (CPU), numpy and `random` to the states that `global_states` returned."""
    torch_state, (algorithm, keys, *rest), (version, internal, gauss) = states
    torch.set_rng_state(torch_state)
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    random.setstate((version, tuple(internal), gauss))  # loading may turn tuples into lists


def derive_seed(*parts: int | str | bytes) -> int:
    """Return a seed below 2**63 that is a hash of all `parts`, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def digest_of_torch_state() -> bytes:
    """Return a digest of the state of torch's global generator: on CUDA that of the device."""
    return hashlib.blake2b(torch_states()[-1].numpy().tobytes(), digest_size=8).digest()


def torch_states() -> list[torch.Tensor]:
    """Return the state of torch's global generator of the CPU and, if CUDA is in use, that of the current device."""
    of_device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *of_device]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Set the generators to the states that `torch_states` returned."""
    torch.set_rng_state(states[0])
    for each in states[1:]:
        torch.cuda.set_rng_state(each)


def seed_torch(seed: int) -> None:
    """Seed the generators whose states `torch_states` returns."""
    # torch.manual_seed takes milliseconds where other devices are not initialized: it keeps a traceback for each.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


@contextmanager
def own_numbers(seed: int) -> Iterator[None]:
    """Draw from `seed` inside the block. Afterwards the generators continue where they were before.

    Only the second number of a pair that `numpy.random.randn` has drawn is forgotten. Inside another such block, do
    nothing.
    """
    if _shared:
        yield
        return
    _shared.append(draw_from(seed, _OWN_OF_NUMPY))
    try:
        yield
    finally:
        _shared.pop()()


@contextmanager
def shared_numbers() -> Iterator[None]:
    """Inside a block of `own_numbers`, draw what is drawn outside of it, and continue that."""
    if not _shared:
        yield
        return
    return_to_own = _returning()
    _shared.pop()()
    try:
        yield
    finally:
        _shared.append(_returning())
        return_to_own()


def draw_from(seed: int, of_numpy: np.random.MT19937) -> Callable[[], None]:
    """Seed the global generators, and return a function that returns to their states before.

    `of_numpy` takes the place of numpy's global generator until then. Calls that are nested need one each.
    """
    return_to_states = _returning()
    _NUMPY.set_bit_generator(of_numpy)
    seed_torch(seed)
    np.random.seed(seed % MAX_NUMPY_SEED)
    random.seed(seed)
    return return_to_states


def _returning() -> Callable[[], None]:
    """Return a function that sets the generators to their states of now."""
    on_torch, on_python, of_numpy = torch_states(), random.getstate(), _NUMPY.get_bit_generator()

    def set_states() -> None:
        set_torch_states(on_torch)
        random.setstate(on_python)
        _NUMPY.set_bit_generator(of_numpy)

    return set_states


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
    if len(states) != ranks.world_size or not {"torch", "numpy", "python"} <= states[ranks.rank].keys():
        held = f"random states for a different number of ranks ({len(states)})" if states else "no random states"
        rank_zero_info(
            f"The checkpoint has {held}, so they are not restored: dropout masks and other random numbers differ from "
            "those of the uninterrupted run."
        )
        return
    local = states[ranks.rank]
    set_global_states((local["torch"], local["numpy"], local["python"]))
    on_cuda = [device for device in devices if device.type == "cuda"]
    for device, state in zip(on_cuda, local.get(CUDA, []), strict=False):
        torch.cuda.set_rng_state(state, device)


def without_cuda_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return `states` without those of CUDA devices, for use on a rank other than the one that saved them."""
    return {name: value for name, value in states.items() if name != CUDA}
