"""Iterable datasets: every rank reads the whole stream, and keeps its part of it."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lightning_paral.data.global_order import Seed
from lightning_paral.data.order_rng import SeededRNG, derive_seed
from lightning_paral.data.padding import PaddingBatch
from lightning_paral.data.sampler import ShardSpec, too_few_batches


class ShardedIterable(IterableDataset[Any]):
    """The part of a rank, and in it of a `DataLoader` worker, of a stream.

    Batches of the stream go to the ranks in turns, and the turns to the workers: a loader gives its rank the batches
    that the sampler of a dataset with indices would. Copied into worker processes.

    Args:
        dataset: yields the same samples in every process, as far as it draws from the global random generators.
        share: which part of it.
        batch_size: samples in a batch of the loader as the user made it; 1 where it has `batch_size=None`.
        drop_last: leave out the last batch if it is smaller.
        seed: what the randomness derives from.
        number: tells the loaders of one kind apart.
    """

    def __init__(
        self, dataset: Iterable[Any], shard: ShardSpec, batch_size: int, drop_last: bool, seed: Seed, number: int
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._seed = seed
        self._number = number
        self._epoch = 0
        self._num_iterations = 0  # of this epoch; in workers that persist, of all: they do not see `set_epoch`
        self._skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._skip = epoch, 0
        self._num_iterations = 0

    def resume(self, epoch: int, num_samples: int) -> None:
        """Let the next iteration, of `epoch`, leave out the first `num_samples` of the stream."""
        self.set_epoch(epoch)
        self._skip = num_samples

    @property
    def turn_size(self) -> int:
        """Samples of the stream that the ranks together take in a step."""
        return self.batch_size if self.shard.split == "global" else self.batch_size * self.shard.world_size

    @property
    def part_size(self) -> int:
        """Samples that a rank takes in a step."""
        return self.turn_size // self.shard.world_size

    def __len__(self) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]
        num_batches = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return self.shard.num_steps(num_batches) * self.part_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rng = SeededRNG(derive_seed(self._seed.value, self._number, self._epoch, self._num_iterations))
        num_samples_to_skip = self._skip if not self._num_iterations else 0
        self._num_iterations += 1
        beginning: list[Any] = []
        with rng.drawing():
            stream = iter(self.dataset)
            if num_samples_to_skip >= self.turn_size:
                first, part, size = self._read_turn(stream, keep=True)
                beginning = part or first
                num_samples_to_skip -= size
            for _ in islice(stream, num_samples_to_skip):
                pass
        for turn in count():
            mine = turn % num_workers == number
            with rng.drawing():
                first, part, size = self._read_turn(stream, mine or not turn)
            beginning = beginning or part or first
            if size == self.turn_size or self._is_whole(size):
                yield from part if mine else ()
            elif mine:
                yield from self._end(beginning, first, part, turn, size)
            if size < self.turn_size:
                return

    def _read_turn(self, stream: Iterator[Any], keep: bool) -> tuple[list[Any], list[Any], int]:
        """Read a turn; return its first batch, this rank's part, both empty unless kept, and how much was there."""
        rank, world_size = self.shard.rank, self.shard.world_size
        first: list[Any] = []
        part: list[Any] = []
        size = 0
        for index in range(self.turn_size // self.batch_size):
            batch = list(islice(stream, self.batch_size))
            if self.drop_last and len(batch) < self.batch_size:
                break
            size += len(batch)
            if keep and not index:
                first = batch
            if keep and self.shard.split == "global":
                part = batch[rank::world_size]
            elif keep and index == rank:
                part = batch
        return first, part, size

    def _is_whole(self, size: int) -> bool:
        """Whether every rank has its whole batch, though the last of them is smaller."""
        return self.shard.split == "batch" and -(-size // self.batch_size) == self.shard.world_size

    def _end(self, beginning: list[Any], first: list[Any], part: list[Any], turn: int, size: int) -> Iterable[Any]:
        """Return what this rank draws in a last turn that does not reach all ranks."""
        if not size:
            return []
        if self.shard.remainder == "pad":
            return part or [PaddingBatch(sample) for sample in first[: self.part_size]]
        if self.shard.split == "global":
            missing = -(-size // self.shard.world_size) - len(part)
            return part + beginning[:missing]
        if self.shard.remainder == "wrap":
            return part or beginning
        if not turn and not self._skip:
            raise too_few_batches(self.dataset, self.shard.world_size)
        return []


class EpochForwarder:
    """The endless sampler that a `DataLoader` wants for an iterable dataset, where Lightning leaves the epoch."""

    def __init__(self, dataset: ShardedIterable) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset."""
        self._dataset.set_epoch(epoch)


def in_agreement(
    batches: Iterator[Any],
    restart: Callable[[], Iterator[Any]],
    shard: ShardSpec,
    any_has: Callable[[bool], bool],
    all_have: Callable[[bool], bool],
) -> Iterator[Any]:
    """Yield the batches of a stream that shards itself, as many on every rank. *Collective*, once for each batch.

    With `shard.remainder` `"drop"` all ranks end with the first that runs out. Otherwise they end with the last: until
    then the others start again (`"wrap"`) or yield fillers (`"pad"`).
    """
    first_pass, last = True, None
    while True:
        batch = next(batches, _END)
        first_pass = first_pass and batch is not _END
        if not (all_have(first_pass) if shard.remainder == "drop" else any_has(first_pass)):
            return
        if batch is not _END:
            last = batch
        elif shard.remainder == "wrap":
            batches = restart()
            batch = next(batches, None)
        else:
            batch = PaddingBatch(last)
        yield batch


_END = object()
