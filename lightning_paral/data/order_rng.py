"""Random generators that draw the order of samples: the same on every rank, separate from those of training."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from lightning_paral.distributed.rng_state import global_states, set_global_states

_MAX_NUMPY_SEED = 2**32
_NUM_GLOBAL = 3  # global generators in `States`


def derive_seed(*parts: int) -> int:
    """Return a seed below 2**63 that depends on all `parts`, and is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class OrderRNG(Protocol):
    """The random generators that an order draws from."""

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context inside which the global generators continue the stream of this order."""


class SeededRNG:
    """A random stream that starts from a seed and flows through the global generators of torch (CPU), numpy, `random`.

    Inside `drawing()` the generators continue this stream; on exit the caller's states are restored.

    Args:
        seed: start of the stream.
        generators: generators that samplers own; each starts from its own initial seed combined with `seed`.
    """

    def __init__(self, seed: int, generators: tuple[torch.Generator, ...] = ()) -> None:
        self._seed = seed
        self._generators = generators
        self._stream: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Continue this stream inside the block; restore the generators on exit, also after an exception."""
        callers = states_of(self._generators)
        try:
            if self._stream is None:
                self._start()
            else:
                set_states(self._stream, self._generators)
            yield
            self._stream = states_of(self._generators)
        finally:
            set_states(callers, self._generators)

    def _start(self) -> None:
        torch.default_generator.manual_seed(self._seed)
        np.random.seed(self._seed % _MAX_NUMPY_SEED)
        random.seed(self._seed)
        for generator in self._generators:
            # Not `seed` alone: generators that a user seeded differently must give different orders. `manual_seed` also
            # sets the initial seed, so `drawing` restores the generator by its state.
            generator.manual_seed(derive_seed(generator.initial_seed(), self._seed))


States = tuple[Any, ...]
"""States of the global generators of torch (CPU), numpy and `random`, then of samplers' own: safe to load."""


def states_of(generators: Sequence[torch.Generator]) -> States:
    """Return the states of the global generators and of `generators`."""
    return *global_states(), *(generator.get_state() for generator in generators)


def set_states(states: States, generators: Sequence[torch.Generator]) -> None:
    """Set the global generators and `generators` to what `states_of` returned."""
    of_torch, of_numpy, of_random, *own = states
    set_global_states((of_torch, of_numpy, of_random))
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)


def match_generators(states: States, generators: Sequence[torch.Generator]) -> States:
    """Return `states` for `generators`; if their number has changed, those keep their current states."""
    if len(states) == _NUM_GLOBAL + len(generators):
        return states
    return (*states[:_NUM_GLOBAL], *(generator.get_state() for generator in generators))


class SharedRNG:
    """The random stream of a single process: an order starts from the generators' current states and advances them.

    All ranks draw from rank 0's states. A generator of another rank is advanced only if it equalled rank 0's before;
    otherwise it stays where it is. An order is drawn in chunks. Training may draw between two of them; the next chunk
    continues from the end of the one before, the same on all ranks.

    Args:
        generators: generators that samplers own.
        agree: returns what rank 0 passes to it; *collective*.
        start: states to start from in place of the current ones, to draw an order again.
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
        self._stream: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Continue this stream inside the block. *Collective* at the first call, if there is an `agree`."""
        callers = states_of(self._generators)
        if self.start is None:
            self.start = callers if self._agree is None else self._agree(callers)
        before = self.start if self._stream is None else self._stream
        restored = callers
        set_states(before, self._generators)
        try:
            yield
            self._stream = states_of(self._generators)
            restored = tuple(
                after if _same(caller, begun) else caller
                for caller, begun, after in zip(callers, before, self._stream, strict=True)
            )
        finally:
            set_states(restored, self._generators)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
