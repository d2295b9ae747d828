"""Draw the batches of one rank: each sample once in evaluation, equally many steps on all ranks in training."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_paral.data.batch_slices import num_samples_in
from lightning_paral.data.global_order import GlobalOrder
from lightning_paral.data.order_rng import States
from lightning_paral.errors import ConfigurationError

_MAX_START_STATES = 64  # more repetitions than workers draw ahead


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Which batches of a global order a rank gets, and what happens to a remainder that does not reach all ranks."""

    data_rank: int
    data_size: int
    split: Literal["batch", "global"]
    """`"batch"`: full batches, rank by rank in turn. `"global"`: a part of each batch."""
    remainder: Literal["drop", "wrap", "pad"]
    """`"pad"`, in evaluation: a rank for which nothing is left gets a padding batch."""

    @property
    def may_need_padding(self) -> bool:
        """Whether some ranks may run out of batches before others. A single rank never needs padding."""
        return self.remainder == "pad" and self.data_size > 1

    def num_steps(self, num_batches: int) -> int:
        """Return the number of steps in which the ranks together draw `num_batches`; the same on all ranks."""
        if self.split == "global":
            return num_batches
        return num_batches // self.data_size if self.remainder == "drop" else -(-num_batches // self.data_size)


class RankBatchSampler:
    """A batch sampler for a `DataLoader` that draws the batches of one rank.

    Iterated again in the same epoch, as by a combined loader that cycles, it draws a new order: a repetition.

    Args:
        order: the global order of batches.
        shard: this rank's part of it.
    """

    def __init__(self, order: GlobalOrder, shard: ShardSpec) -> None:
        self.order = order
        self.shard = shard
        self.padding_steps: set[int] = set()
        """Steps of the current iteration in which this rank draws a padding batch. Known once the step is drawn."""
        self.uneven_steps: set[int] = set()
        """Steps of the current iteration in which some rank draws a padding batch."""
        self.loss_weights: dict[int, float] = {}
        """By step, with `split="global"`: the weight of this rank's mean in the mean of the step, if that is not 1."""
        self._epoch = 0
        self._repetition = 0
        self._skip = 0, 0  # samples, steps
        self._num_samples = array("q")  # drawn since the start of the repetition, after each step
        self._starts = [0]  # first step of each repetition
        self._start_states: list[States | None] = []  # random states at the start of each repetition
        self._resume_from: States | Literal["seed"] | None = None

    @property
    def sampler(self) -> "RankBatchSampler":
        """This object itself: Lightning calls `set_epoch` of a batch sampler's `sampler` only."""
        return self

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
        self.padding_steps.clear()
        self.uneven_steps.clear()
        self.loss_weights.clear()
        num_samples, num_steps = self._skip if len(self._starts) == 1 else (0, 0)
        # Forget steps of an abandoned iteration, which `DataLoader` workers drew ahead.
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
        rest: Sequence[Any] = ()
        for chunk in self._drawn(num_samples, beginning):
            full = len(chunk) - len(chunk) % data_size
            for start in range(0, full, data_size):
                num_samples += num_samples_in(chunk[start : start + data_size]) if batched else data_size
                record(num_samples)
                yield chunk[start + rank]
            rest = chunk[full:]  # not empty for the last chunk only
        if rest and remainder == "drop" and not num_samples:
            raise too_few_batches(self.order.batches, self.shard.data_size)
        if rest and remainder != "drop":
            self.uneven_steps.add(len(self._num_samples))
            record(num_samples + (num_samples_in(rest) if batched else len(rest)))
            if rank < len(rest):
                yield rest[rank]
            elif remainder == "wrap":
                yield beginning[(rank - len(rest)) % len(beginning)]
            else:
                self.padding_steps.add(len(self._num_samples) - 1)
                yield rest[0]

    def _draw_batch_slices(self, num_samples: int) -> Iterator[Any]:
        rank, data_size, record = self.shard.data_rank, self.shard.data_size, self._num_samples.append
        # The rank after that of the last sample comes first, so that batches of one sample reach all ranks in turn.
        start = (rank - num_samples) % data_size
        for chunk in self._drawn(num_samples):
            for batch in chunk:
                size = len(batch)
                num_samples += size
                local = batch[start::data_size]
                if size % data_size:
                    local = self._weigh(len(self._num_samples), local, batch)
                    start = (rank - num_samples) % data_size
                record(num_samples)
                yield local

    def _drawn(self, num_samples: int, beginning: list[Any] | None = None) -> Iterator[Sequence[Any]]:
        resume_from = self._resume_from if len(self._starts) == 1 else None
        batches_per_step = self.shard.data_size if self.shard.split == "batch" else 1
        return self.order.draw(
            self._epoch, self._repetition, num_samples, beginning, resume_from, self._note_start, batches_per_step
        )

    def _note_start(self, states: States | None) -> None:
        self._start_states.append(states)
        if len(self._start_states) > _MAX_START_STATES:  # a short loader that is repeated many times
            self._start_states[-_MAX_START_STATES - 1] = None

    def _weigh(self, step: int, local: list[Any], batch: list[Any]) -> list[Any]:
        """Note the loss weight of `local` in a batch that the ranks cannot divide equally; pad it if it is empty."""
        self.loss_weights[step] = len(local) * self.shard.data_size / len(batch)
        if len(batch) < self.shard.data_size:
            self.uneven_steps.add(step)
        if local:
            return local
        self.padding_steps.add(step)
        return batch[:1]

    def position(self, num_steps: int) -> dict[str, Any]:
        """Return the position in the order after `num_steps` of this epoch, in terms that hold at any world size."""
        index = max(0, bisect_right(self._starts, num_steps - 1) - 1)
        repetition = self._repetition - (len(self._starts) - 1) + index
        samples = self._num_samples[num_steps - 1] if 0 < num_steps <= len(self._num_samples) else 0
        states = self._start_states[index] if index < len(self._start_states) else None
        return {"repetition": repetition, "samples": samples} | ({} if states is None else {"begun": states})

    def resume(self, epoch: int, position: dict[str, Any], num_steps: int) -> int:
        """Make the next iteration start at `position` of `epoch`.

        Args:
            epoch: the epoch that was saved.
            position: what `position` returned, at any world size.
            num_steps: steps of the epoch before `position`, at the world size of the save.

        Returns:
            Steps of the epoch before `position` at this world size, counted so that the epoch has `len(self)` steps.
        """
        self.set_epoch(epoch)
        self._repetition = position["repetition"]
        self._resume_from = position.get("begun", "seed")
        num_left = self.order.num_batches_after(position["samples"])
        if num_left is not None and not self._repetition:
            num_steps = len(self) - self.shard.num_steps(num_left)
        self._skip = position["samples"], num_steps
        return num_steps


def too_few_batches(batches: object, data_size: int) -> ConfigurationError:
    """Return the error for a training loader that `remainder="drop"` leaves without a batch."""
    return ConfigurationError(
        f"The {type(batches).__name__} has fewer batches than there are ranks, {data_size}, and remainder='drop' "
        "drops them all. Set remainder='wrap' or split='global', or make the batches smaller."
    )
