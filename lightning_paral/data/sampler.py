"""Draw the batches of one rank: each sample once in evaluation, the same number of steps on all ranks in training."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lightning.pytorch.utilities import rank_zero_warn

from lightning_paral.data.batch_slices import num_samples_in
from lightning_paral.data.global_order import GlobalOrder
from lightning_paral.data.order_rng import States
from lightning_paral.errors import ConfigurationError

_MAX_START_STATES = 64  # more repetitions than loader workers draw in advance


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
        self.padding_steps: set[int] = set()
        """Steps of the current iteration in which this rank draws a padding batch. Steps not drawn yet are missing."""
        self.uneven_steps: set[int] = set()
        """Steps of the current iteration in which some rank draws a padding batch."""
        self.loss_weights: dict[int, float] = {}
        """With `split="global"`, the weight of this rank's mean loss in the mean over ranks, by step; 1 if missing."""
        self.shares: dict[int, tuple[int, int]] = {}
        """By step, what says how a batch is unequally divided, equal on all ranks: its size and its first data rank."""
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
        self.padding_steps.clear()
        self.uneven_steps.clear()
        if len(self._starts) == 1:  # otherwise this is a repetition, and earlier steps may still be waiting
            self.loss_weights.clear()
            self.shares.clear()
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
        rest: Sequence[Any] = ()
        for chunk in self._draw_chunks(num_samples, beginning):
            full = len(chunk) - len(chunk) % data_size
            for start in range(0, full, data_size):
                num_samples += num_samples_in(chunk[start : start + data_size]) if batched else data_size
                record(num_samples)
                yield chunk[start + rank]
            rest = chunk[full:]  # empty except for the last chunk
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
        # A batch starts at the rank after that of the previous sample, so that batches of one sample reach all ranks.
        start = (rank - num_samples) % data_size
        for chunk in self._draw_chunks(num_samples):
            for batch in chunk:
                size = len(batch)
                num_samples += size
                local = batch[start::data_size]
                if size % data_size:
                    local = self._record_uneven(len(self._num_samples), local, batch, (start - rank) % data_size)
                    start = (rank - num_samples) % data_size
                record(num_samples)
                yield local

    def _draw_chunks(self, num_samples: int, beginning: list[Any] | None = None) -> Iterator[Sequence[Any]]:
        resume_from = self._resume_from if len(self._starts) == 1 else None
        batches_per_step = self.shard.data_size if self.shard.split == "batch" else 1
        return self.order.draw(
            self._epoch, self._repetition, num_samples, beginning, resume_from, self._record_start, batches_per_step
        )

    def _record_start(self, states: States | None) -> None:
        self._start_states.append(states)
        if len(self._start_states) > _MAX_START_STATES:  # a short loader that is repeated many times
            self._start_states[-_MAX_START_STATES - 1] = None

    def _record_uneven(self, step: int, local: list[Any], batch: list[Any], first: int) -> list[Any]:
        """Record the loss weight of `local`, a part of an unequally divided batch. Return padding if it is empty."""
        self.loss_weights[step] = len(local) * self.shard.data_size / len(batch)
        self.shares[step] = len(batch), first
        if len(batch) < self.shard.data_size:
            self.uneven_steps.add(step)
            if self.shard.remainder != "pad":
                reject_or_warn_about_repeated_sample(self, len(batch), self.shard.data_size)
        if local:
            return local
        self.padding_steps.add(step)
        return batch[:1]

    @property
    def had_larger_batches(self) -> bool:
        """Whether the batches drawn before the last one had, on average, more samples than there are data ranks."""
        num_steps = len(self._num_samples) - 1
        return num_steps > 0 and self._num_samples[num_steps - 1] > num_steps * self.shard.data_size

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


class _Source(Protocol):
    rejects_repeated_samples: bool
    has_warned: bool


def reject_or_warn_about_repeated_sample(source: _Source, num_samples: int, data_size: int) -> None:
    """Warn once about a training batch of `num_samples` from `source`, fewer than `data_size` ranks.

    Raises:
        ConfigurationError: `source` rejects repeated samples.
    """
    problem = f"A batch has fewer samples than there are ranks, {num_samples} for {data_size}"
    if source.rejects_repeated_samples:
        raise ConfigurationError(
            f"{problem}, and training_step takes a `dataloader_iter` and draws its batches itself. A sample that a "
            "rank repeats, because it has none of its own, would count twice. Set drop_last=True in the loader, or let "
            "training_step take `batch, batch_idx`."
        )
    if not source.has_warned:
        source.has_warned = True
        rank_zero_warn(
            f"{problem}. A rank without one runs a sample of another rank. It has no part in the gradient, in "
            "torchmetrics, and in values logged with sync_dist=True. It counts in what else the step does on that "
            "rank: values logged without sync_dist, items that it adds to lists, self.all_gather, and BatchNorm's "
            "statistics. Set drop_last=True in the loader to leave such batches out."
        )


def too_few_batches(batches: object, data_size: int) -> ConfigurationError:
    """Return the error for a training loader whose batches are all dropped by `remainder="drop"`."""
    return ConfigurationError(
        f"The {type(batches).__name__} has fewer batches than there are ranks, {data_size}, and remainder='drop' "
        "drops them all. Set remainder='wrap' or split='global', or make the batches smaller."
    )
