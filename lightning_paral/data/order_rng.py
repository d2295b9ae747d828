"""Random state that an order is drawn under: the same on every rank, and apart from the training's own."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

_MAX_NUMPY_SEED = 2**32
_NUM_GLOBAL = 3  # states of generators that everybody draws from


def derive_seed(*parts: int) -> int:
    """Return a seed below 2**63 that depends on all `parts`, and is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class OrderRNG(Protocol):
    """What an order is drawn under."""

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context in which the order draws."""


class SeededRNG:
    """The global generators of torch (CPU), numpy and `random` as an order sees them, from seed to exhaustion.

    Inside `drawing()` they are where the order left them the last time; outside, where everybody else did.

    Args:
        seed: what they start from.
        generators: generators that samplers hold themselves; they start from their own seed joined with `seed`.
    """

    def __init__(self, seed: int, generators: tuple[torch.Generator, ...] = ()) -> None:
        self._seed = seed
        self._generators = generators
        self._inside: States | None = None

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

    def _states(self) -> "States":
        return states_of(self._generators)

    def _set_states(self, states: "States") -> None:
        set_states(states, self._generators)


States = tuple[Any, ...]
"""Of torch (CPU), numpy, `random`, and of generators that samplers hold: plain data that a checkpoint can hold."""


def states_of(generators: Sequence[torch.Generator]) -> States:
    """Return the states of the global generators and of `generators`."""
    kind, keys, *rest = np.random.get_state()
    of_numpy = (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    own = tuple(generator.get_state() for generator in generators)
    return torch.default_generator.get_state(), of_numpy, random.getstate(), *own


def set_states(states: States, generators: Sequence[torch.Generator]) -> None:
    """Give the global generators and `generators` what `states_of` returned."""
    of_torch, (kind, keys, *rest), of_random, *own = states
    torch.default_generator.set_state(of_torch)
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(of_random)
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)


def match_generators(states: States, generators: Sequence[torch.Generator]) -> States:
    """Return `states` for `generators`, of which there may be others by now: those begin where they are."""
    if len(states) == _NUM_GLOBAL + len(generators):
        return states
    return (*states[:_NUM_GLOBAL], *(generator.get_state() for generator in generators))


class SharedRNG:
    """The generators as one process has them: an order draws from where everybody else left them, and they go on.

    All ranks draw from rank 0's. A rank's own generator goes on behind the order only where it was the same as rank 0's
    before; another one stays where it is. Between the chunks of an order the code that trains may draw; then the order
    goes on from where it was itself, the same on all ranks.

    Args:
        generators: those that samplers hold themselves.
        agree: returns what rank 0 passes to it; *collective*.
        start: the states to begin from, in place of those there are: an order drawn again.
    """

    def __init__(
        self,
        generators: tuple[torch.Generator, ...] = (),
        agree: Callable[[States], States] | None = None,
        start: States | None = None,
    ) -> None:
        self._generators = generators
        self._agree = agree
        self.start = start
        self._inside: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the code inside draw. With the first call ranks agree: *collective* if there is an `agree`."""
        outside = states_of(self._generators)
        if self.start is None:
            self.start = outside if self._agree is None else self._agree(outside)
        inside = self.start if self._inside is None else self._inside
        after = outside
        set_states(inside, self._generators)
        try:
            yield
            self._inside = states_of(self._generators)
            after = tuple(
                new if _same(was, begun) else was for was, begun, new in zip(outside, inside, self._inside, strict=True)
            )
        finally:
            set_states(after, self._generators)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
