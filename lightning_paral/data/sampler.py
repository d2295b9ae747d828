"""Draw the batches of one rank: each sample once in evaluation, the same number of steps on all ranks in training.

Every rank draws the order of all batches as one process does, from the same random stream, and keeps its own batches.
"""

import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.distributed.exchange import Facts, broadcast_from_first_rank, check_same
from lightning_paral.distributed.rng_state import (
    MAX_NUMPY_SEED,
    derive_seed,
    global_states,
    set_global_states,
    shared_numbers,
)
from lightning_paral.errors import ConfigurationError

_NUM_GLOBAL = 3  # the number of global generators in `States`
_CHUNK = 256  # batches drawn at a time, because exchanging random states takes as long as drawing about ten batches
_CHECKED_BATCHES, _CHECKED_INDICES = 8, 64  # how many batches the ranks compare, and how many indices of each
_MAX_START_STATES = 64  # more repetitions than loader workers draw in advance

_SAME_DATA = (
    "Every rank must have the same dataset and draw the same batches, and keeps its part of them. What is random must "
    "be the same on all ranks: call seed_everything() first, or give it a generator with a seed, as in "
    "random_split(..., generator=torch.Generator().manual_seed(0)). If ranks are meant to have different data, or the "
    "sampler divides it itself, set Trainer(use_distributed_sampler=False)."
)

States = tuple[Any, ...]
"""States of the global generators of torch (CPU), numpy and `random`, then of the generators that samplers own.

All are of types that can be loaded safely.
"""


# How the samples of a step are divided among the data ranks


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Which batches of a global order a data rank draws, and what it does with a remainder too small for all ranks."""

    data_rank: int
    data_size: int
    split: Literal["batch", "global"]
    """`"batch"`: the ranks draw full batches in turn. `"global"`: every rank draws a part of each batch."""
    remainder: Literal["drop", "wrap", "pad"]
    """`"drop"`: leave out the remainder. `"wrap"`: fill it with batches from the beginning of the order. `"pad"`, for
    evaluation: ranks for which nothing is left draw a padding batch."""

    @property
    def may_need_padding(self) -> bool:
        """Whether some ranks may run out of batches before others and need padding."""
        return self.remainder == "pad" and self.data_size > 1

    def num_steps(self, num_batches: int) -> int:
        """Return the number of steps in which all ranks together draw `num_batches` batches."""
        if self.split == "global":
            return num_batches
        return num_batches // self.data_size if self.remainder == "drop" else -(-num_batches // self.data_size)

    def mark_parts(self, num_samples: int, first: int, *, had_larger_steps: bool) -> "Mark":
        """Return the mark of this rank's part of a batch that is divided unequally.

        Args:
            num_samples: the number of samples of the batch.
            first: the data rank that draws its first sample.
            had_larger_steps: whether earlier batches had more samples than there are data ranks.
        """
        num_own = len(range((self.data_rank - first) % self.data_size, num_samples, self.data_size))
        return Mark(
            weight=num_own * self.data_size / num_samples,
            some_have_none=num_samples < self.data_size,
            num_samples=num_samples,
            first=first,
            exceeds_ranks=num_samples > self.data_size or had_larger_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How a step is divided in which the ranks have, or may have, different numbers of samples."""

    weight: float = 1.0
    """The number of this rank's samples, divided by the mean number of all data ranks; 1.0 if that is not known.

    0.0 for padding: a batch, often of another rank, that only makes the number of steps equal. It counts nowhere.
    """
    some_have_none: bool = False
    """Whether the batch of another rank may be padding."""
    num_samples: int | None = None
    """The number of samples of all ranks together, if it is known."""
    first: int = 0
    """The data rank that has the first of these samples."""
    exceeds_ranks: bool = False
    """Whether this or an earlier step had more samples than there are data ranks."""

    @property
    def is_padding(self) -> bool:
        """Whether this rank has no samples."""
        return self.weight == 0.0


EVEN = Mark()
PADDING = Mark(weight=0.0, some_have_none=True)
MAYBE_PADDED = Mark(some_have_none=True)
"""Of the steps of a stream, whose end is not known beforehand."""


class BatchSource:
    """What draws this rank's batches of one loader, in every epoch.

    Args:
        shard: which batches of the loader this rank draws.
    """

    def __init__(self, shard: ShardSpec) -> None:
        self.shard = shard
        self.marks: dict[int, Mark] = {}
        """The marks of uneven steps. Steps not drawn yet are missing."""
        self.epoch = 0
        """The epoch of the next or current iteration."""
        self._has_warned = False

    def record(self, step: int, mark: Mark) -> None:
        """Keep the mark of a step. Warn once if some ranks have no sample in a step of training."""
        self.marks[step] = mark
        if mark.some_have_none and self.shard.remainder != "pad" and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"A batch has fewer samples than there are ranks, {mark.num_samples} for {self.shard.data_size}. A "
                "rank without one runs a sample of another rank, which counts only in what the step does without "
                "sync_dist and torchmetrics: in items added to lists, self.all_gather, BatchNorm's statistics, and "
                "plain logged values. Set drop_last=True in the loader to leave such batches out."
            )

    def too_few_batches(self, batches: object) -> ConfigurationError:
        """Return the error for a training loader whose batches are all dropped by `remainder="drop"`."""
        return ConfigurationError(
            f"The {type(batches).__name__} has fewer batches than there are ranks, {self.shard.data_size}, and "
            "remainder='drop' drops them all. Set remainder='wrap' or split='global', or make the batches smaller."
        )


# The order in which one process draws batches


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

    facts: Facts | None = None
    """What ranks compare together with their first batches; `None` for a single rank."""

    shared: bool = False
    """Whether to start from the current states of the global generators, as a single process does, not from `seed`."""

    samplers: tuple[Any, ...] = field(default=())
    """The samplers that receive `set_epoch`, and whose own generators are seeded."""

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
        return sized_len(self.batches)

    def num_batches_after(self, num_samples: int) -> int | None:
        """Return the number of batches after the first `num_samples` of an epoch, or `None` if it is unknown."""
        num_batches = self.num_batches()
        batch_size = getattr(self.batches, "batch_size", None) if self.batched else 1
        if num_batches is None or not isinstance(batch_size, int):
            return None
        length = sized_len(getattr(self.batches, "sampler", self.batches))
        if length is None:
            length = num_batches * batch_size
        return 0 if num_samples >= length else max(0, num_batches - num_samples // batch_size)


def _text_of_first(batches: Sequence[Any]) -> str:
    """Return a text with the first indices of the first batches, the same in every process."""
    beginning = batches[:_CHECKED_BATCHES]
    return str([batch[:_CHECKED_INDICES] if isinstance(batch, list) else batch for batch in beginning])


# This rank's batches of it


class RankBatchSampler(BatchSource):
    """A batch sampler for a `DataLoader` that draws the batches of one rank.

    If it is iterated again in the same epoch, as by a combined loader that cycles, it draws a new order: a repetition.

    Args:
        order: the global order of batches.
        shard: which of these batches this rank draws.
    """

    def __init__(self, order: GlobalOrder, shard: ShardSpec) -> None:
        super().__init__(shard)
        self.order = order
        self._repetition = 0
        self._skip = 0, 0  # samples and steps that the next iteration skips
        self._num_samples = array("q")  # drawn since the start of the repetition, after each step
        self._starts = [0]  # first step of each repetition
        self._start_states: list[States | None] = []  # random states at the start of each repetition; `None` for a seed
        self._resume_from: States | Literal["seed"] | None = None

    @property
    def sampler(self) -> "RankBatchSampler":
        """This object itself, because Lightning calls `set_epoch` only on the `sampler` of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration."""
        if epoch != self.epoch:
            self.epoch, self._repetition, self._skip = epoch, 0, (0, 0)
            self._starts = [0]
            self._start_states, self._resume_from = [], None
            del self._num_samples[:]
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        num_batches = self.order.num_batches()
        if num_batches is None:
            raise TypeError(f"{type(self.order.batches).__name__} has no length.")
        num_steps = self.shard.num_steps(num_batches)
        if num_batches and not num_steps:
            raise self.too_few_batches(self.order.batches)
        return num_steps

    def __iter__(self) -> Iterator[Any]:
        if len(self._starts) == 1:  # otherwise this is a repetition, and earlier steps may still be waiting
            self.marks.clear()
        num_samples, num_steps = self._skip if len(self._starts) == 1 else (0, 0)
        # Forget steps of an abandoned iteration, which were drawn in advance for `DataLoader` workers.
        del self._num_samples[self._starts[-1] :]
        del self._start_states[len(self._starts) - 1 :]
        self._num_samples.extend([0] * num_steps)
        if self.shard.split == "batch":
            yield from self._draw_batches(num_samples)
        else:
            yield from self._draw_batch_slices(num_samples)
        if self.shard.remainder != "pad":
            self._starts.append(len(self._num_samples))
            self._repetition += 1

    def _draw_batches(self, num_samples: int) -> Iterator[Any]:
        rank, data_size, remainder = self.shard.data_rank, self.shard.data_size, self.shard.remainder
        batched, record = self.order.batched, self._num_samples.append
        beginning: list[Any] = [None] * (data_size - 1) if remainder == "wrap" else []
        rest: list[Any] = []
        for chunk in self._draw_chunks(num_samples, beginning):
            full = len(chunk) - len(chunk) % data_size
            for start in range(0, full, data_size):
                num_samples += sum(map(len, chunk[start : start + data_size])) if batched else data_size
                record(num_samples)
                yield chunk[start + rank]
            rest = chunk[full:]  # empty except for the last chunk
        if rest and remainder == "drop" and not num_samples:
            raise self.too_few_batches(self.order.batches)
        if rest and remainder != "drop":
            step = len(self._num_samples)
            record(num_samples + (sum(map(len, rest)) if batched else len(rest)))
            if remainder == "wrap":
                yield rest[rank] if rank < len(rest) else beginning[(rank - len(rest)) % len(beginning)]
            else:
                self.marks[step] = MAYBE_PADDED if rank < len(rest) else PADDING
                yield rest[rank if rank < len(rest) else 0]

    def _draw_batch_slices(self, num_samples: int) -> Iterator[Any]:
        rank, data_size, record = self.shard.data_rank, self.shard.data_size, self._num_samples.append
        # A batch starts at the rank after that of the previous sample, so that batches of one sample reach all ranks.
        start = (rank - num_samples) % data_size
        for chunk in self._draw_chunks(num_samples):
            for batch in chunk:
                size, step = len(batch), len(self._num_samples)
                local = batch[start::data_size]
                if size % data_size:
                    had_larger = num_samples > step * data_size
                    first = (rank - start) % data_size
                    self.record(step, self.shard.mark_parts(size, first, had_larger_steps=had_larger))
                    start = (rank - num_samples - size) % data_size
                num_samples += size
                record(num_samples)
                yield local or batch[:1]

    def _draw_chunks(self, num_samples_to_skip: int, beginning: list[Any] | None = None) -> Iterator[list[Any]]:
        """Yield the batches that are left of the epoch in chunks, which end with a step. The last may be empty.

        The first chunk is compared across ranks, which is *collective*.

        Args:
            num_samples_to_skip: the number of samples to skip. If they end inside a batch, the first batch is its rest.
            beginning: a list to fill with the first `len(beginning)` batches of the epoch, even if they are skipped.
        """
        order, batches_per_step = self.order, self.shard.data_size if self.shard.split == "batch" else 1
        num_batches = -(-_CHUNK // batches_per_step) * batches_per_step
        resume_from = self._resume_from if len(self._starts) == 1 else None
        if resume_from == "seed" or (resume_from is None and not order.shared):
            seed = derive_seed(order.seed.value, order.loader_index, self.epoch, self._repetition)
            rng = OrderRNG(order.generators(), seed=seed)
        else:
            broadcast = None if order.facts is None else broadcast_from_first_rank
            rng = OrderRNG(order.generators(), broadcast=broadcast, start=resume_from)
        with rng.drawing():
            batches = iter(order.batches)
            first = list(islice(batches, len(beginning))) if beginning else []
            if beginning:
                beginning[:] = first
            while num_samples_to_skip > 0 and (first := first or list(islice(batches, 1))):
                size = len(first[0]) if order.batched else 1
                first[:1] = [first[0][num_samples_to_skip:]] if size > num_samples_to_skip else []
                num_samples_to_skip -= size
            chunk = first + list(islice(batches, num_batches - len(first)))
        self._start_states.append(rng.start)
        if len(self._start_states) > _MAX_START_STATES:  # a short loader that is repeated many times
            self._start_states[-_MAX_START_STATES - 1] = None
        if order.facts is not None:
            drawn_from = getattr(order.batches, "sampler", order.batches)
            drawn = {(f"The {type(drawn_from).__name__}", "first draws"): _text_of_first(chunk)}
            check_same({**order.facts, **drawn}, _SAME_DATA)
        while len(chunk) == num_batches:
            yield chunk
            with rng.drawing():
                chunk = list(islice(batches, num_batches))
        yield chunk

    def position(self, num_steps: int) -> dict[str, Any]:
        """Return the position in the order after `num_steps` steps of this epoch, independent of the world size.

        In an order of one process, it has the states of the generators that samplers own.
        """
        index = max(0, bisect_right(self._starts, num_steps - 1) - 1)
        repetition = self._repetition - (len(self._starts) - 1) + index
        samples = self._num_samples[num_steps - 1] if 0 < num_steps <= len(self._num_samples) else 0
        states = self._start_states[index] if index < len(self._start_states) else None
        position = {"repetition": repetition, "samples": samples} | ({} if states is None else {"begun": states})
        own = [generator.get_state() for generator in self.order.generators()] if self.order.shared else []
        return position | ({"generators": own} if own else {})

    def restore_generators(self, position: dict[str, Any]) -> None:
        """Restore the generators that samplers own to their states in `position`."""
        saved = position.get("generators", ()) if self.order.shared else ()
        for generator, state in zip(self.order.generators(), saved, strict=False):
            generator.set_state(state)

    def resume(self, epoch: int, position: dict[str, Any], num_steps: int) -> int:
        """Make the next iteration start at `position` of `epoch`.

        Args:
            epoch: the epoch that was saved.
            position: the position that `position` returned, at any world size.
            num_steps: the number of steps of the epoch before `position`, at the world size of the save.

        Returns:
            The number of steps of the epoch before `position` at this world size, chosen so that the epoch has
            `len(self)` steps in total.
        """
        self.set_epoch(epoch)
        self._repetition = position["repetition"]
        self._resume_from = position.get("begun", "seed")
        num_left = self.order.num_batches_after(position["samples"])
        if num_left is not None and not self._repetition:
            num_steps = len(self) - self.shard.num_steps(num_left)
        self._skip = position["samples"], num_steps
        return num_steps
