"""How the samples of a step are divided among the data ranks, and the mark of a batch where the division is uneven."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_paral.errors import ConfigurationError


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


PADDING = Mark(weight=0.0, some_have_none=True)
MAYBE_PADDED = Mark(some_have_none=True)
"""Of the steps of a stream, whose end is not known beforehand."""


@dataclass(frozen=True)
class Marked:
    """A batch, or a sample of one, and how its step is divided. The loop takes off the mark before the user's code."""

    batch: Any
    mark: Mark
    state: Any = None
    """The own state of the iterable dataset after the step, in training, if it has one."""

    def pin_memory(self) -> "Marked":
        """Return the same with tensors in pinned memory, for loaders with `pin_memory=True`."""
        if hasattr(self.batch, "pin_memory"):
            return dataclasses.replace(self, batch=self.batch.pin_memory())
        pinned = apply_to_collection(self.batch, Tensor, Tensor.pin_memory, allow_frozen=True)
        return dataclasses.replace(self, batch=pinned)


@dataclass(frozen=True)
class Collate:
    """Wraps a `collate_fn` so that a batch of marked samples has their mark."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        """Return the batch of `samples`, which is a single sample with `batch_size=None`."""
        if isinstance(samples, Marked):
            return dataclasses.replace(samples, batch=self.collate(samples.batch))
        if isinstance(samples, list) and samples and isinstance(samples[-1], Marked):
            users = [sample.batch if isinstance(sample, Marked) else sample for sample in samples]
            return dataclasses.replace(samples[-1], batch=self.collate(users))
        return self.collate(samples)


def strip_padding(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield `batches` without padding batches and without marks."""
    for batch in batches:
        if not isinstance(batch, Marked):
            yield batch
        elif not batch.mark.is_padding:
            yield batch.batch


class Source(Protocol):
    """What draws the batches of a loader."""

    rejects_repeated_samples: bool
    """Whether a training batch with fewer samples than ranks is an error."""
    has_warned: bool
    """Whether a warning about a repeated sample was given."""


def reject_or_warn_about_repeated_sample(source: Source, num_samples: int, data_size: int) -> None:
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
