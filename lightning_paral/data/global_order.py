"""The order in which one process draws batches; every rank draws the same."""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_paral.data.batch_slices import BatchTaker
from lightning_paral.data.order_rng import (
    OrderRNG,
    SeededRNG,
    SharedRNG,
    States,
    derive_seed,
    match_generators,
)

_CHUNK = 256  # batches drawn at a time, because swapping the random states costs as much as drawing about ten
_MIN_STEPS = 16  # at least so many steps of all ranks per chunk; for the same reason
_CHECKED_BATCHES, _CHECKED_INDICES = 8, 64


@dataclass
class Seed:
    """The seed of all orders of a run; a checkpoint replaces its value."""

    value: int


@dataclass
class GlobalOrder:
    """The batches of one loader, in the order in which one process draws them.

    Every rank draws all batches, as lists of indices, and loads only its own.
    """

    batches: Iterable[Any]
    """The user's batch sampler; with `batch_size=None` the sampler, whose indices count as batches."""

    seed: Seed
    number: int = 0
    """Index among the loaders of the same stage, so that two of them are shuffled differently."""

    batched: bool = True
    """Whether `batches` yields lists of indices, not single indices."""

    compare: Callable[[int], None] | None = None
    """Given a checksum of the first batches, raises if that of another rank differs. *Collective*."""

    shared: bool = False
    """Whether to draw from the current states of the global generators, as one process does, and not from `seed`."""

    agree: Callable[[States], States] | None = None
    """Returns what rank 0 passes to it; used if `shared`. *Collective*."""

    samplers: tuple[Any, ...] = field(default=())
    """Objects to forward `set_epoch` to, and whose own generators are seeded."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the collectives: the process that unpickles an order, such as a loader worker, is no rank."""
        return vars(self) | {"compare": None, "agree": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalOrder":
        collectives = {name: getattr(self, name) for name in ("compare", "agree")}
        own = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in collectives}
        return GlobalOrder(**own, **collectives)

    def draw(
        self,
        epoch: int,
        repetition: int,
        num_samples_to_skip: int = 0,
        beginning: list[Any] | None = None,
        resume_from: States | Literal["seed"] | None = None,
        on_start: Callable[[States | None], None] | None = None,
        multiple_of: int = 1,
    ) -> Iterator[Sequence[Any]]:
        """Yield the batches of an epoch in chunks of at least 256 batches, the last one shorter or empty.

        The first chunk is compared across ranks if there is a `compare`, which is *collective*.

        Args:
            epoch: seeds the order, together with `repetition`.
            repetition: how often this epoch's batches were drawn to the end before.
            num_samples_to_skip: samples to skip. If they end inside a batch, its rest is the first batch.
            beginning: a list to fill with the first `len(beginning)` batches of the epoch, skipped or not.
            resume_from: to draw an earlier order again, the random states it started from, or `"seed"`.
            on_start: called with the random states that the order starts from, `None` for the seed.
            multiple_of: chunks hold a multiple of this many batches: those that all ranks draw in a step.
        """
        num_batches = max(_MIN_STEPS, -(-_CHUNK // multiple_of)) * multiple_of
        rng: OrderRNG
        if resume_from == "seed" or (resume_from is None and not self.shared):
            seed = derive_seed(self.seed.value, self.number, epoch, repetition)
            rng = SeededRNG(seed, self.generators())
        else:
            start = None if resume_from is None else match_generators(resume_from, self.generators())
            rng = SharedRNG(self.generators(), self.agree, start)
        with rng.drawing():
            batches = BatchTaker(self.batches)
            if beginning:
                beginning[:] = batches.take(len(beginning))
                batches.put_back(beginning)
            batches.put_back(self._skip(batches, num_samples_to_skip))
            chunk = batches.take(num_batches)
        if on_start is not None:
            on_start(rng.start if isinstance(rng, SharedRNG) else None)
        if self.compare is not None:
            self.compare(checksum(chunk))
        while len(chunk) == num_batches:
            yield chunk
            with rng.drawing():
                chunk = batches.take(num_batches)
        yield chunk

    def _skip(self, batches: BatchTaker, num_samples: int) -> list[Any]:
        """Skip `num_samples`; if they end inside a batch, return a list of its rest."""
        while num_samples > 0:
            taken = batches.take(1)
            if not taken:
                break
            size = len(taken[0]) if self.batched else 1
            if size > num_samples:
                return [taken[0][num_samples:]]
            num_samples -= size
        return []

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
        """Return the number of batches in an epoch; `None` if the sampler does not know it."""
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def num_batches_after(self, num_samples: int) -> int | None:
        """Return the number of batches after the first `num_samples` of an epoch; `None` if batches differ in size."""
        num_batches = self.num_batches()
        batch_size = getattr(self.batches, "batch_size", None) if self.batched else 1
        if num_batches is None or not isinstance(batch_size, int):
            return None
        try:
            length = len(getattr(self.batches, "sampler", self.batches))  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = num_batches * batch_size
        return 0 if num_samples >= length else max(0, num_batches - num_samples // batch_size)


def checksum(batches: Sequence[Any]) -> int:
    """Return a checksum of the first indices of the first batches, the same in every process."""
    beginning = [batch[:_CHECKED_INDICES] if isinstance(batch, list) else batch for batch in batches[:_CHECKED_BATCHES]]
    return zlib.crc32(repr(beginning).encode())
