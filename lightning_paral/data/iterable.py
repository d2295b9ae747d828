"""Distribute the loader of an iterable dataset: every rank reads the full stream and keeps its own batches."""

import copy
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, cast

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from lightning_paral.compat.torch.loaders import copy_without_workers, set_worker_info
from lightning_paral.data.loaders import Batches, Collate, Loader, Marked, with_iteration
from lightning_paral.data.sampler import MAYBE_PADDED, PADDING, BatchSource, OrderRNG, Seed, ShardSpec
from lightning_paral.distributed.exchange import any_rank, every_rank, gather_ints
from lightning_paral.distributed.rng_state import derive_seed
from lightning_paral.errors import ConfigurationError

_NUM_STATES = 8  # of the last steps, of which a save leaves out those that were read but not trained on
_END = object()


def distribute_iterable(
    loader: Loader, shard: ShardSpec, seed: Seed, loader_index: int
) -> tuple[Loader, "ShardedIterable"]:
    """Return a copy of `loader` that yields this rank's batches, and the dataset of the copy.

    Args:
        loader: the user's loader. It is not changed.
        shard: which batches this rank draws.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.

    Raises:
        ConfigurationError: `split="global"` cannot divide the batches of a training loader equally among the ranks.
    """
    name = type(loader.dataset).__name__
    batch_size = loader.batch_size or 1
    if shard.split == "global" and batch_size % shard.data_size:
        if shard.remainder != "pad":
            raise ConfigurationError(
                f"split='global' divides each batch of {name} among {shard.data_size} ranks, but the loader has "
                f"batch_size={loader.batch_size}. Make it a multiple of the number of ranks, or set split='batch'."
            )
        shard = dataclasses.replace(shard, split="batch")
    if shard.data_size > 1:
        rank_zero_info(
            f"{name} is an iterable dataset: each rank and worker reads all of it, or the part that it yields by "
            "get_worker_info(), and keeps its share. If it shards itself by rank, set shard_iterable=False."
        )
    stream = ShardedIterable(loader, shard, seed, loader_index)
    forwarder = _EpochForwarder(stream)
    changes: dict[str, Any] = {"dataset": stream, "sampler": forwarder, "drop_last": False}
    if loader.batch_size is not None:
        changes["batch_size"] = stream.local_batch_size
        changes["batch_sampler"] = BatchSampler(forwarder, stream.local_batch_size, drop_last=False)  # type: ignore[arg-type]
    if shard.may_need_padding or (shard.split == "global" and shard.data_size > 1):
        changes["collate_fn"] = Collate(loader.collate_fn)
    changed = copy_without_workers(loader, **changes)
    if shard.may_need_padding:
        return with_iteration(changed, _mark_all), stream
    return (with_iteration(changed, stream.without_marks) if "collate_fn" in changes else changed), stream


def _mark_all(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield batch if isinstance(batch, Marked) else Marked(batch, MAYBE_PADDED)


class ShardedIterable(BatchSource, IterableDataset[Any]):
    """This rank's samples of a stream or, in a `DataLoader` worker, the worker's part of them.

    The stream is read in global batches: the samples that all ranks together use in one step. Worker `i` of `n` yields
    samples of the global batches `i`, `i + n`, ..., so that a rank gets the same batches as from a map-style dataset.
    Every worker process has a copy of this object.

    Args:
        loader: the user's loader. Its dataset must yield the same samples in every process; it does if all its random
            numbers come from the global generators.
        shard: which batches this rank draws.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.
    """

    def __init__(self, loader: Loader, shard: ShardSpec, seed: Seed, loader_index: int) -> None:
        super().__init__(shard)
        self.dataset: Any = loader.dataset
        self.batch_size = loader.batch_size or 1
        self.drop_last = loader.drop_last
        self.num_workers = loader.num_workers
        self.keeps_states = shard.remainder != "pad" and not self.num_workers and is_stateful(self.dataset)
        """Whether a run resumes by the dataset's own state, which only this process knows."""
        self._states: dict[int, dict[str, Any]] = {}  # after each of the last steps
        self._at_start: Any = None  # the dataset's state before it was read
        self._num_finished_steps = 0  # of iterations of this epoch that have ended
        self._seed = seed
        self._loader_index = loader_index
        self._num_iterations = 0  # of this epoch, but of all epochs in persistent workers, which do not see `set_epoch`
        self._saved: Mapping[str, Any] = {}  # the position at which this epoch begins

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration."""
        if epoch != self.epoch:
            self.epoch, self._saved, self._num_finished_steps = epoch, {}, 0
            self.marks.clear()
            self._states.clear()
        self._num_iterations = 0

    def position(self, num_steps: int) -> dict[str, Any]:
        """Return the position in the stream after `num_steps` steps of this epoch, with the dataset's own state."""
        num_samples = num_steps * self.global_batch_size
        if self._saved.get("samples") == num_samples:  # no step has been taken since
            return dict(self._saved)
        position = {"repetition": 0, "samples": num_samples, "num_workers": self.num_workers}
        state = self._states.get(num_steps)
        return position | {"step_size": self.global_batch_size} | ({} if state is None else {"state": state})

    def resume(self, epoch: int, position: Mapping[str, Any], num_steps: int = 0) -> int:
        """Make the next iteration start at `position` of `epoch`, which `position` returned, at any world size.

        Returns:
            The number of steps of the epoch before `position` at this world size.
        """
        self.set_epoch(epoch)
        self._saved = position
        return int(position["samples"]) // self.global_batch_size

    def start_over(self) -> None:
        """Let a dataset that has a state of its own begin where it began in this process, whatever was read ahead."""
        if self._at_start is not None:
            self.dataset.load_state_dict(copy.deepcopy(self._at_start))

    def without_marks(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of training without marks, and record how uneven steps are divided."""
        step = self._num_finished_steps or self._saved.get("samples", 0) // self.global_batch_size
        for batch in batches:
            if isinstance(batch, Marked):
                self.record(step, batch.mark)
            step += 1
            yield batch.batch if isinstance(batch, Marked) else batch
        self._num_finished_steps = step

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all ranks together use in one step."""
        return self.batch_size if self.shard.split == "global" else self.batch_size * self.shard.data_size

    @property
    def local_batch_size(self) -> int:
        """The number of samples that a rank uses in one step."""
        return self.global_batch_size // self.shard.data_size

    def __len__(self) -> int:
        divides_itself = self.num_workers > 1 and _asks_for_worker(type(self.dataset))
        if divides_itself and self.shard.split == "batch" and self.shard.data_size > 1:
            raise TypeError("The ranks divide the part of each worker, and may take more steps than for the whole.")
        length = len(self.dataset)
        num_batches = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return self.shard.num_steps(num_batches) * self.local_batch_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker = getattr(worker, "worker", worker)  # in a later epoch of a persistent worker
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rng = OrderRNG(seed=derive_seed(self._seed.value, self._loader_index, self.epoch, self._num_iterations))
        saved = {} if self._num_iterations else self._saved
        keeps_states = self.keeps_states and not self._num_iterations
        self._num_iterations += 1
        num_to_skip, step_size = saved.get("samples", 0), saved.get("step_size", self.global_batch_size)
        first_step, num_taken = num_to_skip // self.global_batch_size, num_to_skip // step_size
        info = _PartInfo(worker, (worker_id + num_taken) % num_workers, self.dataset)
        if worker is not None:
            set_worker_info(info)
        dataset = self.dataset
        if keeps_states and self._at_start is None:
            self._at_start = copy.deepcopy(dataset.state_dict())
        if keeps_states and "state" in saved:
            dataset.load_state_dict(saved["state"]["dataset"])
            rng.states, num_to_skip = saved["state"]["generators"], 0
        with rng.drawing():
            stream = iter(dataset)
            stream = chain(list(islice(stream, 1)), stream)
            if info.was_asked:  # and so the stream is this worker's part, of which each batch counts
                num_to_skip = len(range(info.id, num_taken, num_workers)) * step_size
                worker_id, num_workers = 0, 1
            num_missing = num_to_skip - sum(1 for _ in islice(stream, num_to_skip))
        had = saved.get("num_workers", self.num_workers)
        if info.was_asked and num_taken and (had != self.num_workers or num_missing >= step_size):
            raise ConfigurationError(
                f"{type(self.dataset).__name__} divides itself by get_worker_info(). A run can continue inside an "
                f"epoch only with as many workers as before, num_workers={had} instead of {self.num_workers}, and only "
                "if none had come to its end. Resume from a checkpoint saved at the end of an epoch."
            )
        for step in count():
            mine = step % num_workers == worker_id
            with rng.drawing():
                first, local, size = self._read_global_batch(stream, mine)
            if keeps_states:
                num_steps = first_step + step + 1
                self._states[num_steps] = {"dataset": copy.deepcopy(dataset.state_dict()), "generators": rng.states}
                self._states.pop(num_steps - _NUM_STATES, None)
            if size == self.global_batch_size or self._is_full(size):
                yield from local if mine else ()
            elif mine:
                yield from self._remainder(first, local, size, is_first=not step and not first_step)
            if size < self.global_batch_size:
                return

    def _read_global_batch(self, stream: Iterator[Any], keep: bool) -> tuple[list[Any], list[Any], int]:
        """Read a global batch. Return its first batch, this rank's samples (both empty unless `keep`) and its size."""
        rank, data_size = self.shard.data_rank, self.shard.data_size
        first: list[Any] = []
        local: list[Any] = []
        size = 0
        for index in range(self.global_batch_size // self.batch_size):
            batch = list(islice(stream, self.batch_size))
            if self.drop_last and len(batch) < self.batch_size:
                break
            size += len(batch)
            if keep and not index:
                first = batch
            if keep and self.shard.split == "global":
                local = batch[rank::data_size]
            elif keep and index == rank:
                local = batch
        return first, local, size

    def _is_full(self, size: int) -> bool:
        """Return whether `size` samples give every rank a batch, even if that of the last rank is smaller."""
        return self.shard.split == "batch" and -(-size // self.batch_size) == self.shard.data_size

    def _remainder(self, first: list[Any], local: list[Any], size: int, *, is_first: bool) -> list[Any]:
        """Return this rank's samples of the last global batch, which is too small to give every rank a batch."""
        remainder = self.shard.remainder
        if not size:
            return []
        if remainder == "pad" and not local:
            return [Marked(sample, PADDING) for sample in first[: self.local_batch_size]]
        if self.shard.split == "global":
            uneven = local or first[:1]  # a rank without a sample runs one of another rank
            had_larger = self.global_batch_size > self.shard.data_size
            mark = self.shard.mark_parts(size, 0, had_larger_steps=had_larger)
            mark = dataclasses.replace(mark, some_have_none=mark.some_have_none or remainder == "pad")
            return [Marked(sample, mark) for sample in uneven] if size % self.shard.data_size else uneven
        if remainder == "drop" and is_first:
            raise self.too_few_batches(self.dataset)
        return [] if remainder == "drop" else local or first


class _PartInfo:
    """What `get_worker_info()` returns to a dataset. It notes whether the dataset asks for its part."""

    def __init__(self, worker: Any, part: int, dataset: Iterable[Any]) -> None:
        self.worker = worker
        self.dataset = dataset
        self.was_asked = False
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copies are made, before there is a worker
            raise AttributeError(name)
        self.was_asked = self.was_asked or name in ("id", "num_workers")
        return self._part if name == "id" else getattr(self.worker, name)


class _EpochForwarder:
    """An endless sampler for the `DataLoader`, which passes Lightning's `set_epoch` on to the dataset."""

    def __init__(self, dataset: ShardedIterable) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        return repeat(None)

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)


def is_stateful(source: object) -> bool:
    """Return whether a dataset or loader saves and loads its own position, as those of streaming libraries do."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def synchronize_self_sharded(loader: Loader, shard: ShardSpec, group: dist.ProcessGroup | None) -> Loader:
    """Return a copy of `loader` that yields the same number of batches on every rank. *Collective* over `group`.

    Iterating over the copy is also *collective*, once per batch. With one data rank, return `loader` itself.
    """
    if shard.data_size == 1:
        return loader
    rank_zero_info(
        f"{type(loader.dataset).__name__} shards itself, so ranks agree before each batch whether to continue."
    )
    length = sized_len(loader)
    lengths = gather_ints(-1 if length is None else length, group)
    num_batches = min(lengths) if shard.remainder == "drop" or min(lengths) < 0 else max(lengths)
    in_step = partial(_in_lockstep, remainder=shard.remainder, group=group)
    return with_iteration(loader, in_step, num_batches if num_batches >= 0 else None)


def _in_lockstep(batches: Iterator[Any], remainder: str, group: dist.ProcessGroup | None) -> Iterator[Any]:
    """Yield the same number of batches on every rank. *Collective* over `group`, once per batch.

    With `remainder="drop"`, all ranks stop when the first one runs out of batches. Otherwise they stop when the last
    one does. Until then, the others start over (`"wrap"`) or yield padding batches (`"pad"`).
    """
    agree = every_rank if remainder == "drop" else any_rank
    first_pass, last = True, None
    while True:
        batch = next(batches, _END)
        first_pass = first_pass and batch is not _END
        if not agree(first_pass, group):
            return
        if batch is _END and remainder == "wrap":
            cast(Batches, batches).start_over()
            batch = next(batches, None)
        if remainder == "pad":
            last, batch = (last, Marked(last, PADDING)) if batch is _END else (batch, Marked(batch, MAYBE_PADDED))
        yield batch


def _asks_for_worker(cls: type) -> bool:
    """Return whether a method of a dataset's class calls `torch.utils.data.get_worker_info`."""
    methods = [value for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    return any("get_worker_info" in inspect.unwrap(method).__code__.co_names for method in methods)
