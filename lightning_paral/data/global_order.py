"""The order in which one process would draw batches, drawn alike on every rank."""

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

_CHUNK = 256  # batches drawn at a time; changing the random state costs as much as drawing some ten batches
_MIN_TURNS = 16  # steps of all ranks per chunk, at least; for the same reason
_CHECKED_BATCHES, _CHECKED_INDICES = 8, 64


@dataclass
class Seed:
    """What all orders of a run derive from; a checkpoint brings its own."""

    value: int


@dataclass
class GlobalOrder:
    """The batches of one loader in the order of one process.

    Every rank draws all of them, as lists of indices, and loads only its own.
    """

    batches: Iterable[Any]
    """The user's batch sampler; where the loader has `batch_size=None`, the sampler, whose indices count as batches."""

    seed: Seed
    number: int = 0
    """Tells the loaders of one kind apart, so that two shuffled ones are not shuffled alike."""

    batched: bool = True
    """Whether `batches` yields lists of indices, and not single ones."""

    compare: Callable[[int], None] | None = None
    """*Collective*: given a checksum of the first batches, raises if that of another rank differs."""

    shared: bool = False
    """Whether orders are drawn as one process would, from the generators as they are then, and not from `seed`."""

    agree: Callable[[States], States] | None = None
    """*Collective*: returns what rank 0 passes to it. For shared generators."""

    samplers: tuple[Any, ...] = field(default=())
    """Everything `set_epoch` is forwarded to, and whose generators are seeded."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the functions that ask the other ranks: they cannot be reached where a pickled order is used."""
        return vars(self) | {"compare": None, "agree": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalOrder":
        asking = {name: getattr(self, name) for name in ("compare", "agree")}
        own = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in asking}
        return GlobalOrder(**own, **asking)

    def draw(
        self,
        epoch: int,
        repetition: int,
        num_samples_to_skip: int = 0,
        beginning: list[Any] | None = None,
        again: States | Literal["seed"] | None = None,
        began: Callable[[States | None], None] | None = None,
        multiple_of: int = 1,
    ) -> Iterator[Sequence[Any]]:
        """Yield the batches of an epoch in chunks of at least 256 batches, the last one shorter or empty.

        The first chunk is compared across ranks if there is a `compare`, which is *collective*.

        Args:
            epoch: with the repetition, what the randomness depends on.
            repetition: how often this epoch's batches were drawn to the end before.
            num_samples_to_skip: samples to leave out. A batch in which they end comes with the rest of it.
            beginning: its items are replaced by the first batches of the epoch, skipped or not, as many as it has.
            again: for an order that was drawn before: what it began from, `"seed"` for the seed.
            began: called with what it begins from, in this sense, `None` for the seed.
            multiple_of: chunks hold a multiple of this many batches: those that all ranks draw in a step.
        """
        num_batches = max(_MIN_TURNS, -(-_CHUNK // multiple_of)) * multiple_of
        rng: OrderRNG
        if again == "seed" or (again is None and not self.shared):
            seed = derive_seed(self.seed.value, self.number, epoch, repetition)
            rng = SeededRNG(seed, self.generators())
        else:
            start = None if again is None else match_generators(again, self.generators())
            rng = SharedRNG(self.generators(), self.agree, start)
        with rng.drawing():
            batches = BatchTaker(self.batches)
            if beginning:
                beginning[:] = batches.take(len(beginning))
                batches.put_back(beginning)
            batches.put_back(self._skip(batches, num_samples_to_skip))
            chunk = batches.take(num_batches)
        if began is not None:
            began(rng.start if isinstance(rng, SharedRNG) else None)
        if self.compare is not None:
            self.compare(checksum(chunk))
        while len(chunk) == num_batches:
            yield chunk
            with rng.drawing():
                chunk = batches.take(num_batches)
        yield chunk

    def _skip(self, batches: BatchTaker, num_samples: int) -> list[Any]:
        """Skip `num_samples`; return the rest of the batch they end in, if they end inside one."""
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
        """Return the generators that samplers hold themselves."""
        found = (getattr(sampler, "generator", None) for sampler in self.samplers)
        return tuple({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers that want to know it."""
        for sampler in self.samplers:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def num_batches(self) -> int | None:
        """Return how many batches an epoch has; `None` if the sampler does not know."""
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def num_batches_after(self, num_samples: int) -> int | None:
        """Return how many batches are left after the first samples of an epoch; `None` where they differ in size."""
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
