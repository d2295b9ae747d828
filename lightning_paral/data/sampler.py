"""Draw the batches of one rank: each sample once in evaluation, the same number of steps on all ranks in training."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Literal

from lightning_paral.data.division import (
    MAYBE_PADDED,
    PADDING,
    Mark,
    ShardSpec,
    reject_or_warn_about_repeated_sample,
    too_few_batches,
)
from lightning_paral.data.order import GlobalOrder, States

_MAX_START_STATES = 64  # more repetitions than loader workers draw in advance


class RankBatchSampler:
    """A batch sampler for a `DataLoader` that draws the batches of one rank.

    If it is iterated again in the same epoch, as by a combined loader that cycles, it draws a new order: a repetition.

    Args:
        order: the global order of batches.
        shard: which of these batches this rank draws.
    """

    def __init__(self, order: GlobalOrder, shard: ShardSpec) -> None:
        self.order = order
        self.shard = shard
        self.marks: dict[int, Mark] = {}
        """The marks of uneven steps. Steps not drawn yet are missing."""
        self.rejects_repeated_samples = False
        """Whether a training batch with fewer samples than ranks is an error."""
        self.has_warned = False
        """Whether a warning about a repeated sample was given."""
        self._epoch = 0
        self._repetition = 0
        self._skip = 0, 0  # samples and steps that the next iteration skips
        self._num_samples = array("q")  # drawn since the start of the repetition, after each step
        self._starts = [0]  # first step of each repetition
        self._start_states: list[States | None] = []  # random states at the start of each repetition
        self._resume_from: States | Literal["seed"] | None = None

    @property
    def sampler(self) -> "RankBatchSampler":
        """This object itself, because Lightning calls `set_epoch` only on the `sampler` of a batch sampler."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the next or current iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration."""
        if epoch != self._epoch:
            self._epoch, self._repetition, self._skip = epoch, 0, (0, 0)
            self._starts = [0]
            self._start_states, self._resume_from = [], None
            del self._num_samples[:]
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        num_batches = self.order.num_batches()
        if num_batches is None:
            raise TypeError(f"{type(self.order.batches).__name__} has no length.")
        return self.shard.num_steps(num_batches)

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
            raise too_few_batches(self.order.batches, self.shard.data_size)
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
                    self.marks[step] = self.shard.mark_parts(size, first, had_larger_steps=had_larger)
                    if size < data_size and self.shard.remainder != "pad":
                        reject_or_warn_about_repeated_sample(self, size, data_size)
                    start = (rank - num_samples - size) % data_size
                num_samples += size
                record(num_samples)
                yield local or batch[:1]

    def _draw_chunks(self, num_samples: int, beginning: list[Any] | None = None) -> Iterator[list[Any]]:
        resume_from = self._resume_from if len(self._starts) == 1 else None
        batches_per_step = self.shard.data_size if self.shard.split == "batch" else 1
        return self.order.draw(
            self._epoch, self._repetition, num_samples, beginning, resume_from, self._record_start, batches_per_step
        )

    def _record_start(self, states: States | None) -> None:
        self._start_states.append(states)
        if len(self._start_states) > _MAX_START_STATES:  # a short loader that is repeated many times
            self._start_states[-_MAX_START_STATES - 1] = None

    def position(self, num_steps: int) -> dict[str, Any]:
        """Return the position in the order after `num_steps` steps of this epoch, independent of the world size."""
        index = max(0, bisect_right(self._starts, num_steps - 1) - 1)
        repetition = self._repetition - (len(self._starts) - 1) + index
        samples = self._num_samples[num_steps - 1] if 0 < num_steps <= len(self._num_samples) else 0
        states = self._start_states[index] if index < len(self._start_states) else None
        return {"repetition": repetition, "samples": samples} | ({} if states is None else {"begun": states})

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
