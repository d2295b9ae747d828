"""Random streams from which the order of samples is drawn, the same on every rank."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from lightning_paral.distributed.rng_state import (
    MAX_NUMPY_SEED,
    derive_seed,
    global_states,
    set_global_states,
    shared_numbers,
)

_NUM_GLOBAL = 3  # the number of global generators in `States`


class OrderRNG(Protocol):
    """The random stream from which an order of samples is drawn."""

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context in which the global generators continue this stream."""


class SeededRNG:
    """A random stream that starts from a seed and is drawn from the global generators of torch (CPU), numpy, `random`.

    Inside `drawing()` the generators continue this stream. On exit their previous states are restored, so that the
    stream does not change the random numbers of training.

    Args:
        seed: the seed from which the stream starts.
        generators: the generators that samplers own. Each starts from its own initial seed combined with `seed`.
    """

    def __init__(self, seed: int, generators: tuple[torch.Generator, ...] = ()) -> None:
        self._seed = seed
        self._generators = generators
        self._stream: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Continue this stream inside the block. Restore the generators on exit, even after an exception."""
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
        np.random.seed(self._seed % MAX_NUMPY_SEED)
        random.seed(self._seed)
        for generator in self._generators:
            # Not from `seed` alone: generators that a user seeded differently must give different orders. `manual_seed`
            # also changes the initial seed, but `drawing` restores it with the state.
            generator.manual_seed(derive_seed(generator.initial_seed(), self._seed))


States = tuple[Any, ...]
"""States of the global generators of torch (CPU), numpy and `random`, then of the generators that samplers own.

All are of types that can be loaded safely.
"""


def states_of(generators: Sequence[torch.Generator]) -> States:
    """Return the states of the global generators and of `generators`."""
    return *global_states(), *(generator.get_state() for generator in generators)


def set_states(states: States, generators: Sequence[torch.Generator]) -> None:
    """Set the global generators and `generators` to the states that `states_of` returned."""
    torch_state, numpy_state, python_state, *own = states
    set_global_states((torch_state, numpy_state, python_state))
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)


def match_generators(states: States, generators: Sequence[torch.Generator]) -> States:
    """Return `states`, but with the current states of `generators` if the number of these has changed."""
    if len(states) == _NUM_GLOBAL + len(generators):
        return states
    return (*states[:_NUM_GLOBAL], *(generator.get_state() for generator in generators))


class SharedRNG:
    """The random stream of a single process, which starts from the current states of the generators and advances them.

    All ranks draw from the states of rank 0. On another rank, a generator is advanced only if its state was equal to
    that on rank 0; otherwise it does not change. An order is drawn in chunks, and training may use the generators
    between two chunks. Each chunk continues from the end of the previous one, so that it is the same on all ranks.

    Args:
        generators: the generators that samplers own.
        broadcast: a function that returns the states that rank 0 passes; *collective*. `None` for a single rank.
        start: the states from which to start, to draw an order again; `None` for the current states.
    """

    def __init__(
        self,
        generators: tuple[torch.Generator, ...] = (),
        broadcast: Callable[[States], States] | None = None,
        start: States | None = None,
    ) -> None:
        self._generators = generators
        self._broadcast = broadcast
        self.start = start
        self._stream: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Continue this stream inside the block. *Collective* at the first call, if `broadcast` is not `None`."""
        with shared_numbers():
            callers = states_of(self._generators)
            if self.start is None:
                self.start = callers if self._broadcast is None else self._broadcast(callers)
            before = self.start if self._stream is None else self._stream
            restored = callers
            set_states(before, self._generators)
            try:
                yield
                self._stream = states_of(self._generators)
                restored = tuple(
                    after if _same(caller, earlier) else caller
                    for caller, earlier, after in zip(callers, before, self._stream, strict=True)
                )
            finally:
                set_states(restored, self._generators)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
