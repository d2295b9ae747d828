"""The order in which a single process draws batches. Every rank draws this order."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_paral.data.batch_slices import BatchTaker
from lightning_paral.data.order_rng import OrderRNG, SeededRNG, SharedRNG, States, match_generators
from lightning_paral.distributed.rng_state import derive_seed

_CHUNK = 256  # batches drawn at a time, because exchanging random states takes as long as drawing about ten batches
_MIN_STEPS = 16  # the minimum number of steps per chunk, for the same reason
_CHECKED_BATCHES, _CHECKED_INDICES = 8, 64  # how many batches the ranks compare, and how many indices of each


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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the collectives, because a process that unpickles this, such as a loader worker, is not a rank."""
        return vars(self) | {"compare": None, "broadcast": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalOrder":
        collectives = {name: getattr(self, name) for name in ("compare", "broadcast")}
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
        rng: OrderRNG
        if resume_from == "seed" or (resume_from is None and not self.shared):
            seed = derive_seed(self.seed.value, self.loader_index, epoch, repetition)
            rng = SeededRNG(seed, self.generators())
        else:
            start = None if resume_from is None else match_generators(resume_from, self.generators())
            rng = SharedRNG(self.generators(), self.broadcast, start)
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
            self.compare(_text_of_first(chunk))
        while len(chunk) == num_batches:
            yield chunk
            with rng.drawing():
                chunk = batches.take(num_batches)
        yield chunk

    def _skip(self, batches: BatchTaker, num_samples: int) -> list[Any]:
        """Skip `num_samples`. If they end inside a batch, return a list that contains the rest of it."""
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
        """Return the number of batches in an epoch, or `None` if the sampler has no length."""
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def num_batches_after(self, num_samples: int) -> int | None:
        """Return the number of batches after the first `num_samples` of an epoch, or `None` if it is unknown."""
        num_batches = self.num_batches()
        batch_size = getattr(self.batches, "batch_size", None) if self.batched else 1
        if num_batches is None or not isinstance(batch_size, int):
            return None
        try:
            length = len(getattr(self.batches, "sampler", self.batches))  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = num_batches * batch_size
        return 0 if num_samples >= length else max(0, num_batches - num_samples // batch_size)


def _text_of_first(batches: Sequence[Any]) -> str:
    """Return a text with the first indices of the first batches, the same in every process."""
    beginning = batches[:_CHECKED_BATCHES]
    return str([batch[:_CHECKED_INDICES] if isinstance(batch, list) else batch for batch in beginning])
