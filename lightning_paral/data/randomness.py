"""Random state that an order is drawn under: the same on every rank, and apart from the training's own."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MAX_NUMPY_SEED = 2**32


def derive_seed(*parts: int) -> int:
    """Return a seed below 2**63 that depends on all `parts`, and is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class OrderRandomness:
    """The global generators of torch (CPU), numpy and `random` as an order sees them, from seed to exhaustion.

    Inside `drawing()` they are where the order left them the last time; outside, where everybody else did.

    Args:
        seed: what they start from.
        generators: generators that samplers hold themselves; they start from their own seed joined with `seed`.
    """

    def __init__(self, seed: int, generators: tuple[torch.Generator, ...] = ()) -> None:
        self._seed = seed
        self._generators = generators
        self._inside: tuple[Any, ...] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the code inside draw from this randomness. Everybody else's is restored, whatever happens."""
        outside = self._states()
        try:
            if self._inside is None:
                self._start()
            else:
                self._set_states(self._inside)
            yield
            self._inside = self._states()
        finally:
            self._set_states(outside)

    def _start(self) -> None:
        torch.default_generator.manual_seed(self._seed)
        np.random.seed(self._seed % _MAX_NUMPY_SEED)
        random.seed(self._seed)
        for generator in self._generators:
            # Not `seed` alone: two users' generators with different seeds are to give different orders. The initial
            # seed changes with every `manual_seed`, so it is put back by restoring the state, not by seeding.
            generator.manual_seed(derive_seed(generator.initial_seed(), self._seed))

    def _states(self) -> tuple[Any, ...]:
        own = tuple(generator.get_state() for generator in self._generators)
        return torch.default_generator.get_state(), np.random.get_state(), random.getstate(), own

    def _set_states(self, states: tuple[Any, ...]) -> None:
        of_torch, of_numpy, of_random, own = states
        torch.default_generator.set_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_random)
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)
