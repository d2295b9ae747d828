"""Take batches from a sampler, several at a time, without building the batches that are not read.

A rank draws the batches of all ranks but loads only its own. If torch's own `BatchSampler` iterates over a list of
indices, as with `RandomSampler`, a batch is sliced from this list only when it is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import GeneratorType
from typing import Any, overload

from torch.utils.data import BatchSampler

_LIST_ITERATOR: type = type(iter([]))


@dataclass(frozen=True)
class BatchSlices(Sequence[list[Any]]):
    """Consecutive batches of a range of a list, sliced when they are read. Only the last may be smaller."""

    indices: list[Any]
    start: int
    stop: int
    batch_size: int

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.batch_size)

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "BatchSlices": ...

    def __getitem__(self, index: int | slice) -> "list[Any] | BatchSlices":
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            assert step == 1
            return BatchSlices(
                self.indices, self._batch_start(first), self._batch_start(max(first, last)), self.batch_size
            )
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.indices[self._batch_start(index) : self._batch_start(index + 1)]

    @property
    def num_samples(self) -> int:
        """The number of indices in all batches."""
        return self.stop - self.start

    def _batch_start(self, batch: int) -> int:
        return min(self.start + batch * self.batch_size, self.stop)


def num_samples_in(batches: Sequence[Any]) -> int:
    """Return the number of indices in `batches`."""
    return batches.num_samples if isinstance(batches, BatchSlices) else sum(map(len, batches))


class BatchTaker:
    """Takes the batches of one iteration over a sampler.

    Args:
        batches: a batch sampler. Its iterator is created here.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._returned: list[Any] = []  # batches to take before those of the iterator
        self._slicing = (batches.batch_size, batches.drop_last) if type(batches) is BatchSampler else None
        self._iterator: Iterator[Any] = iter(batches.sampler if type(batches) is BatchSampler else batches)

    def take(self, count: int) -> Sequence[Any]:
        """Return the next `count` batches, or fewer at the end."""
        returned, self._returned = self._returned[:count], self._returned[count:]
        taken = self._take(count - len(returned))
        return [*returned, *taken] if returned else taken

    def put_back(self, batches: Sequence[Any]) -> None:
        """Put `batches` back, so that they are taken next."""
        self._returned[:0] = batches

    def _take(self, count: int) -> Sequence[Any]:
        if self._slicing is None:
            return list(islice(self._iterator, count))
        batch_size, drop_last = self._slicing
        indices, start, stop = _next_items(self._iterator, count * batch_size)
        if drop_last:
            stop -= (stop - start) % batch_size
        return BatchSlices(indices, start, stop, batch_size)


def _next_items(iterator: Iterator[Any], count: int) -> tuple[list[Any], int, int]:
    """Advance `iterator` by `count` items. Return a list that contains them, and their start and stop in this list."""
    if count == 0:
        return [], 0, 0
    first = list(islice(iterator, 1))  # a generator delegates to another iterator only once it has started
    inner: Any = iterator
    while isinstance(inner, GeneratorType):
        inner = inner.gi_yieldfrom
    if first and type(inner) is _LIST_ITERATOR:
        # Return the list itself instead of copying items, and move its iterator past them.
        reduced: Any = inner.__reduce__()  # `(iter, (list,), position)`, without a position at the end
        if len(reduced) == 3 and reduced[2] > 0 and reduced[1][0][reduced[2] - 1] is first[0]:
            indices, start = reduced[1][0], reduced[2] - 1
            if start + count <= len(indices):
                _set_position(inner, start + count)
                return indices, start, start + count
            _set_position(inner, len(indices))
            rest = list(islice(iterator, start + count - len(indices)))
            if not rest:
                return indices, start, len(indices)
            items = indices[start:] + rest
            return items, 0, len(items)
    items = first + list(islice(iterator, count - 1))
    return items, 0, len(items)


def _set_position(iterator: Any, position: int) -> None:
    iterator.__setstate__(position)
