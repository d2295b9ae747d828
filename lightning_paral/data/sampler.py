"""The batches of one rank: every batch once in evaluation, equal steps on all ranks in training."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_paral.data.batch_slices import num_samples_in
from lightning_paral.data.global_order import GlobalOrder
from lightning_paral.data.order_rng import States
from lightning_paral.errors import ConfigurationError

_KEPT = 64  # more repetitions than workers draw ahead


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Which part of an order a rank gets, and what happens at its end."""

    rank: int
    world_size: int
    split: Literal["batch", "global"]
    """Whole batches in turns, or a part of each batch."""
    remainder: Literal["drop", "wrap", "pad"]
    """`"pad"`, in evaluation: a rank for which nothing is left gets a filler, which counts for nothing."""

    @property
    def may_need_padding(self) -> bool:
        """Whether some ranks may run out of batches before others, and draw fillers. A single rank draws none."""
        return self.remainder == "pad" and self.world_size > 1

    def num_steps(self, num_batches: int) -> int:
        """Return in how many steps the ranks together draw `num_batches`, the same on all ranks."""
        if self.split == "global":
            return num_batches
        return num_batches // self.world_size if self.remainder == "drop" else -(-num_batches // self.world_size)


class RankBatchSampler:
    """A batch sampler with the part of one rank of an order, to be put into a `DataLoader`.

    After an epoch's end it starts the same epoch with another order, as a combined loader asks for that cycles.

    Args:
        order: the batches of one process.
        share: which part of them.
    """

    def __init__(self, order: GlobalOrder, shard: ShardSpec) -> None:
        self.order = order
        self.shard = shard
        self.padding_steps: set[int] = set()
        """The steps of the current iteration in which this rank draws a filler. Known once the step is drawn."""
        self.uneven_steps: set[int] = set()
        """Those in which some rank does."""
        self.loss_weights: dict[int, float] = {}
        """In `split="global"`: the weight of this rank's mean in that of the step, where it is not 1, by step."""
        self._epoch = 0
        self._repetition = 0
        self._skip = 0, 0  # samples, steps
        self._num_samples = array("q")  # after each step, since the start of the repetition
        self._starts = [0]  # of the repetitions, in steps
        self._begun: list[States | None] = []  # what the orders of the repetitions began from
        self._again: States | Literal["seed"] | None = None

    @property
    def sampler(self) -> "RankBatchSampler":
        """Itself: Lightning calls `set_epoch` of a batch sampler's `sampler` only."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._repetition, self._skip = epoch, 0, (0, 0)
            self._starts = [0]
            self._begun, self._again = [], None
            del self._num_samples[:]
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        num_batches = self.order.num_batches()
        if num_batches is None:
            raise TypeError(f"{type(self.order.batches).__name__} has no length.")
        return self.shard.num_steps(num_batches)

    def __iter__(self) -> Iterator[Any]:
        self.padding_steps.clear()
        self.uneven_steps.clear()
        self.loss_weights.clear()
        num_samples, num_steps = self._skip if len(self._starts) == 1 else (0, 0)
        # Steps drawn by an iteration that was given up, as `DataLoader` workers draw ahead, do not count.
        del self._num_samples[self._starts[-1] :]
        del self._begun[len(self._starts) - 1 :]
        self._num_samples.extend([0] * num_steps)
        if self.shard.split == "batch":
            yield from self._draw_whole(num_samples)
        else:
            yield from self._draw_parts(num_samples)
        if self.shard.remainder != "pad":
            self._starts.append(len(self._num_samples))
            self._repetition += 1

    def _draw_whole(self, num_samples: int) -> Iterator[Any]:
        rank, world_size, remainder = self.shard.rank, self.shard.world_size, self.shard.remainder
        batched, record = self.order.batched, self._num_samples.append
        beginning: list[Any] = [None] * (world_size - 1) if remainder == "wrap" else []
        left: Sequence[Any] = ()
        for chunk in self._drawn(num_samples, beginning):
            whole = len(chunk) - len(chunk) % world_size
            for start in range(0, whole, world_size):
                num_samples += num_samples_in(chunk[start : start + world_size]) if batched else world_size
                record(num_samples)
                yield chunk[start + rank]
            left = chunk[whole:]  # of the last chunk
        if left and remainder == "drop" and not num_samples:
            raise too_few_batches(self.order.batches, self.shard.world_size)
        if left and remainder != "drop":
            self.uneven_steps.add(len(self._num_samples))
            record(num_samples + (num_samples_in(left) if batched else len(left)))
            if rank < len(left):
                yield left[rank]
            elif remainder == "wrap":
                yield beginning[(rank - len(left)) % len(beginning)]
            else:
                self.padding_steps.add(len(self._num_samples) - 1)
                yield left[0]

    def _draw_parts(self, num_samples: int) -> Iterator[Any]:
        rank, world_size, record = self.shard.rank, self.shard.world_size, self._num_samples.append
        # The rank after the one that drew the last sample comes first: batches of one sample reach all ranks in turn.
        start = (rank - num_samples) % world_size
        for chunk in self._drawn(num_samples):
            for batch in chunk:
                size = len(batch)
                num_samples += size
                part = batch[start::world_size]
                if size % world_size:
                    part = self._weigh(len(self._num_samples), part, batch)
                    start = (rank - num_samples) % world_size
                record(num_samples)
                yield part

    def _drawn(self, num_samples: int, beginning: list[Any] | None = None) -> Iterator[Sequence[Any]]:
        again = self._again if len(self._starts) == 1 else None
        turn = self.shard.world_size if self.shard.split == "batch" else 1
        return self.order.draw(self._epoch, self._repetition, num_samples, beginning, again, self._note, turn)

    def _note(self, begun: States | None) -> None:
        self._begun.append(begun)
        if len(self._begun) > _KEPT:  # of a short loader that is drawn from again and again
            self._begun[-_KEPT - 1] = None

    def _weigh(self, step: int, part: list[Any], batch: list[Any]) -> list[Any]:
        """Note what a part of a batch that does not divide by the ranks counts; return it, or a filler for none."""
        self.loss_weights[step] = len(part) * self.shard.world_size / len(batch)
        if len(batch) < self.shard.world_size:
            self.uneven_steps.add(step)
        if part:
            return part
        self.padding_steps.add(step)
        return batch[:1]

    def position(self, num_steps: int) -> dict[str, Any]:
        """Return where in the order `num_steps` of this epoch lead, in terms that hold at any world size."""
        index = max(0, bisect_right(self._starts, num_steps - 1) - 1)
        repetition = self._repetition - (len(self._starts) - 1) + index
        samples = self._num_samples[num_steps - 1] if 0 < num_steps <= len(self._num_samples) else 0
        begun = self._begun[index] if index < len(self._begun) else None
        return {"repetition": repetition, "samples": samples} | ({} if begun is None else {"begun": begun})

    def resume(self, epoch: int, position: dict[str, Any], num_steps: int) -> int:
        """Let the next iteration start at `position` of `epoch`, `num_steps` after its start at the saving world size.

        Returns:
            the number of steps after which this world is there, counted so that the epoch has `len(self)` of them.
        """
        self.set_epoch(epoch)
        self._repetition = position["repetition"]
        self._again = position.get("begun", "seed")
        left = self.order.num_batches_after(position["samples"])
        if left is not None and not self._repetition:
            num_steps = len(self) - self.shard.num_steps(left)
        self._skip = position["samples"], num_steps
        return num_steps


def too_few_batches(batches: object, world_size: int) -> ConfigurationError:
    """Return the error for a training loader of which `remainder="drop"` leaves nothing."""
    return ConfigurationError(
        f"The {type(batches).__name__} has fewer batches than there are ranks, {world_size}, and remainder='drop' "
        "drops them all. Set remainder='wrap' or split='global', or make the batches smaller."
    )
