"""The order in which a single process draws batches. Every rank draws this order, from the same random stream."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler

from lightning_paral.distributed.rng_state import (
    MAX_NUMPY_SEED,
    derive_seed,
    global_states,
    set_global_states,
    shared_numbers,
)

_NUM_GLOBAL = 3  # the number of global generators in `States`
_CHUNK = 256  # batches drawn at a time, because exchanging random states takes as long as drawing about ten batches
_MIN_STEPS = 16  # the minimum number of steps per chunk, for the same reason
_CHECKED_BATCHES, _CHECKED_INDICES = 8, 64  # how many batches the ranks compare, and how many indices of each

States = tuple[Any, ...]
"""States of the global generators of torch (CPU), numpy and `random`, then of the generators that samplers own.

All are of types that can be loaded safely.
"""


class OrderRNG:
    """The random stream from which an order is drawn: that of the global generators of torch (CPU), numpy, `random`.

    An order is drawn in chunks, and training may use the generators between two chunks. Each chunk continues from the
    end of the previous one, so that it is the same on all ranks.

    - With a `seed`, the stream starts from it, and leaves the generators as they were. Each generator that a sampler
      owns starts from its initial seed combined with `seed`.
    - Without a seed, it is the stream of a single process: it starts from the current states of rank 0, and advances
      the generators. On another rank, a generator is advanced only if its state was equal to that on rank 0.

    Args:
        generators: the generators that samplers own.
        seed: the seed, or `None`.
        broadcast: a function that returns the states that rank 0 passes; *collective*. `None` for a single rank.
        start: the states from which to start, to draw an order again; `None` for the seed, or the current states.
    """

    def __init__(
        self,
        generators: tuple[torch.Generator, ...] = (),
        *,
        seed: int | None = None,
        broadcast: Callable[[States], States] | None = None,
        start: States | None = None,
    ) -> None:
        self._generators = generators
        self._seed = seed
        self._broadcast = broadcast
        if start is not None and len(start) != _NUM_GLOBAL + len(generators):  # the checkpoint is of another sampler
            start = (*start[:_NUM_GLOBAL], *(generator.get_state() for generator in generators))
        self.start = start
        """The states from which a stream without a seed starts, after the first draw."""
        self.states = start
        """The states at which the stream continues; `None` before the first draw."""

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Continue this stream inside the block. *Collective* at the first call, if `broadcast` is not `None`."""
        advances = self._seed is None
        with shared_numbers() if advances else nullcontext():
            callers = restored = self._current()
            try:
                if self.states is not None:
                    self._set(self.states)
                elif self._seed is not None:
                    self._start_from(self._seed)
                else:
                    self.start = self.states = callers if self._broadcast is None else self._broadcast(callers)
                    self._set(self.states)
                before = self.states
                yield
                self.states = self._current()
                if advances:
                    assert before is not None
                    restored = tuple(
                        after if _same(caller, earlier) else caller
                        for caller, earlier, after in zip(callers, before, self.states, strict=True)
                    )
            finally:
                self._set(restored)

    def _start_from(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % MAX_NUMPY_SEED)
        random.seed(seed)
        for generator in self._generators:
            # Not from `seed` alone: generators that a user seeded differently must give different orders. `manual_seed`
            # also changes the initial seed, but `drawing` restores it with the state.
            generator.manual_seed(derive_seed(generator.initial_seed(), seed))

    def _current(self) -> States:
        return *global_states(), *(generator.get_state() for generator in self._generators)

    def _set(self, states: States) -> None:
        torch_state, numpy_state, python_state, *own = states
        set_global_states((torch_state, numpy_state, python_state))
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


@dataclass
class Seed:
    """The seed of all orders of a run. Resuming replaces its value by that of the checkpoint."""

    value: int


@dataclass
class GlobalOrder:
    """The batches of one loader, in the order in which a single process draws them.

    Every rank draws all batches, as lists of indices, and loads only its own.
    """

    batches: Iterable[Any]
    """The user's batch sampler or, with `batch_size=None`, the sampler, whose indices count as batches."""

    seed: Seed
    loader_index: int = 0
    """The index among the loaders of the same Lightning stage. It makes their shuffled orders differ."""

    batched: bool = True
    """Whether `batches` yields lists of indices rather than single indices."""

    compare: Callable[[str], None] | None = None
    """Raises if ranks pass different texts, which have their first batches. *Collective*."""

    shared: bool = False
    """Whether to start from the current states of the global generators, as a single process does, not from `seed`."""

    broadcast: Callable[[States], States] | None = None
    """Returns the states that rank 0 passes; used if `shared`. *Collective*."""

    samplers: tuple[Any, ...] = field(default=())
    """The samplers that receive `set_epoch`, and whose own generators are seeded."""

    def draw(
        self,
        epoch: int,
        repetition: int,
        num_samples_to_skip: int = 0,
        beginning: list[Any] | None = None,
        resume_from: States | Literal["seed"] | None = None,
        on_start: Callable[[States | None], None] | None = None,
        multiple_of: int = 1,
    ) -> Iterator[list[Any]]:
        """Yield the batches of an epoch in chunks of at least 256 batches. The last chunk is shorter or empty.

        The first chunk is compared across ranks if there is a `compare`, which is *collective*.

        Args:
            epoch: the epoch, which seeds the order together with `repetition`.
            repetition: how many times the batches of this epoch have already been drawn to the end.
            num_samples_to_skip: the number of samples to skip. If they end inside a batch, the first batch is its rest.
            beginning: a list to fill with the first `len(beginning)` batches of the epoch, even if they are skipped.
            resume_from: the random states from which an earlier order started, or `"seed"`, to draw that order again.
            on_start: a function called with the random states from which the order starts, or `None` for the seed.
            multiple_of: the number of batches that all ranks together draw in a step. Chunks end with a step.
        """
        num_batches = max(_MIN_STEPS, -(-_CHUNK // multiple_of)) * multiple_of
        if resume_from == "seed" or (resume_from is None and not self.shared):
            seed = derive_seed(self.seed.value, self.loader_index, epoch, repetition)
            rng = OrderRNG(self.generators(), seed=seed)
        else:
            rng = OrderRNG(self.generators(), broadcast=self.broadcast, start=resume_from)
        with rng.drawing():
            take = _taker(self.batches)
            first = take(len(beginning)) if beginning else []
            if beginning:
                beginning[:] = first
            while num_samples_to_skip > 0 and (first := first or take(1)):
                size = len(first[0]) if self.batched else 1
                first[:1] = [first[0][num_samples_to_skip:]] if size > num_samples_to_skip else []
                num_samples_to_skip -= size
            chunk = first + take(num_batches - len(first))
        if on_start is not None:
            on_start(rng.start)
        if self.compare is not None:
            self.compare(_text_of_first(chunk))
        while len(chunk) == num_batches:
            yield chunk
            with rng.drawing():
                chunk = take(num_batches)
        yield chunk

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the generators that samplers own."""
        found = (getattr(sampler, "generator", None) for sampler in self.samplers)
        return tuple({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def set_epoch(self, epoch: int) -> None:
        """Pass `epoch` to the samplers that have a `set_epoch`."""
        for sampler in self.samplers:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def num_batches(self) -> int | None:
        """Return the number of batches in an epoch, or `None` if the sampler has no length."""
        return _length(self.batches)

    def num_batches_after(self, num_samples: int) -> int | None:
        """Return the number of batches after the first `num_samples` of an epoch, or `None` if it is unknown."""
        num_batches = self.num_batches()
        batch_size = getattr(self.batches, "batch_size", None) if self.batched else 1
        if num_batches is None or not isinstance(batch_size, int):
            return None
        length = _length(getattr(self.batches, "sampler", self.batches))
        if length is None:
            length = num_batches * batch_size
        return 0 if num_samples >= length else max(0, num_batches - num_samples // batch_size)


def _taker(batches: Any) -> Callable[[int], list[Any]]:
    """Return a function that returns the next batches, at most as many as given."""
    if type(batches) is not BatchSampler:
        iterator = iter(batches)
        return lambda count: list(islice(iterator, count))
    indices, size = iter(batches.sampler), batches.batch_size

    def slices(count: int) -> list[Any]:  # slicing takes much less time than the batch sampler, which goes by index
        taken = list(islice(indices, count * size))
        if batches.drop_last:
            del taken[len(taken) - len(taken) % size :]
        return [taken[start : start + size] for start in range(0, len(taken), size)]

    return slices


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _text_of_first(batches: Sequence[Any]) -> str:
    """Return a text with the first indices of the first batches, the same in every process."""
    beginning = batches[:_CHECKED_BATCHES]
    return str([batch[:_CHECKED_INDICES] if isinstance(batch, list) else batch for batch in beginning])
