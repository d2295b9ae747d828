"""Distribute the loader of an iterable dataset: every rank reads the full stream and keeps its own batches."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count, islice
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from lightning_paral.compat.private_name import is_named_by
from lightning_paral.compat.torch.loaders import copy_without_workers, set_worker_info
from lightning_paral.data.division import (
    MAYBE_PADDED,
    PADDING,
    Collate,
    Mark,
    Marked,
    ShardSpec,
    reject_or_warn_about_repeated_sample,
    too_few_batches,
)
from lightning_paral.data.loaders import Batches, Loader, with_iteration
from lightning_paral.data.order import OrderRNG, Seed
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
            f"{name} is an iterable dataset: each of {shard.data_size} ranks x {max(1, loader.num_workers)} "
            "workers reads all of it, or the part that it yields by get_worker_info(), and keeps its share. If the "
            "dataset shards itself by rank, set shard_iterable=False."
        )
    dataset = cast(Iterable[Any], loader.dataset)
    stream = ShardedIterable(dataset, shard, batch_size, loader.drop_last, seed, loader_index)
    # A class of the user's that iterates itself must not see the states among the batches.
    stream.keeps_states &= type(loader).__iter__ is DataLoader.__iter__
    return with_stream(loader, stream), stream


def with_stream(loader: Loader, stream: "ShardedIterable") -> Loader:
    """Return a copy of `loader` that reads `stream` instead of its dataset."""
    forwarder, stream.num_workers = _EpochForwarder(stream), loader.num_workers
    changes: dict[str, Any] = {"dataset": stream, "sampler": forwarder, "drop_last": False}
    if loader.batch_size is not None:
        changes["batch_size"] = stream.local_batch_size
        changes["batch_sampler"] = BatchSampler(forwarder, stream.local_batch_size, drop_last=False)  # type: ignore[arg-type]
    marks = stream.shard.split == "global" and stream.shard.data_size > 1
    if stream.shard.may_need_padding or stream.keeps_states or marks:
        changes["collate_fn"] = Collate(loader.collate_fn)
    changed = copy_without_workers(loader, **changes)
    if stream.shard.may_need_padding:
        return with_iteration(changed, _mark_all)
    return with_iteration(changed, stream.without_marks) if "collate_fn" in changes else changed


def _mark_all(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield batch if isinstance(batch, Marked) else Marked(batch, MAYBE_PADDED)


class ShardedIterable(IterableDataset[Any]):
    """This rank's samples of a stream or, in a `DataLoader` worker, the worker's part of them.

    The stream is read in global batches: the samples that all ranks together use in one step. Worker `i` of `n` yields
    samples of the global batches `i`, `i + n`, ..., so that a rank gets the same batches as from a map-style dataset.
    Every worker process has a copy of this object.

    Args:
        dataset: the user's dataset. It must yield the same samples in every process; it does if all its random numbers
            come from the global generators.
        shard: which batches this rank draws.
        batch_size: the number of samples in a batch of the user's loader; 1 if that has `batch_size=None`.
        drop_last: whether to leave out the last batch if it is smaller.
        seed: the seed of the orders of the run.
        loader_index: the index among the loaders of the same Lightning stage.
    """

    def __init__(
        self, dataset: Iterable[Any], shard: ShardSpec, batch_size: int, drop_last: bool, seed: Seed, loader_index: int
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.marks: dict[int, Mark] = {}
        """The marks of uneven steps of training."""
        self.keeps_states = shard.remainder != "pad" and is_stateful(dataset)
        """Whether a run resumes by the dataset's own state."""
        self._states: dict[int, dict[str, Any]] = {}  # after each of the last steps
        self._at_start: Any = None  # the dataset's state before it was read in this process
        self._starts_over = False
        self.rejects_repeated_samples = False
        """Whether a training batch with fewer samples than ranks is an error."""
        self.has_warned = False
        """Whether a warning about a repeated sample was given."""
        self._num_finished_steps = 0  # of iterations of this epoch that have ended
        self._seed = seed
        self._loader_index = loader_index
        self._epoch = 0
        self._num_iterations = 0  # of this epoch, but of all epochs in persistent workers, which do not see `set_epoch`
        self._skip = 0
        self._saved: Mapping[str, Any] = {}
        self.num_workers = 0
        """The number of workers of the loader."""

    @property
    def epoch(self) -> int:
        """The epoch of the next or current iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration."""
        if epoch != self._epoch:
            self._epoch, self._skip, self._saved, self._num_finished_steps = epoch, 0, {}, 0
            self.marks.clear()
            self._states.clear()
        self._num_iterations = 0

    def position(self, num_steps: int) -> dict[str, Any]:
        """Return the position in the stream after `num_steps` steps of this epoch.

        It contains the dataset's own states, if it has any: one or, if the workers have asked for their parts, that of
        each part. Without them, the stream is read again.
        """
        size, num_workers = self.global_batch_size, max(1, self.num_workers)
        if self._saved.get("samples") == num_steps * size:  # no step has been taken since
            return dict(self._saved)
        last = [self._states.get(step) for step in range(max(0, num_steps - num_workers), num_steps)]
        states: list[Any] = last[-1:] if last and last[-1] and last[-1]["part"] is None else last
        turns = range(num_steps - len(states), num_steps)
        is_known = all(
            state is not None and state["part"] in (None, step % num_workers)
            for step, state in zip(turns, states, strict=True)
        )
        position = {"repetition": 0, "samples": num_steps * size, "step_size": size, "num_workers": self.num_workers}
        return position | ({"states": states} if states and is_known else {})

    def resume(self, epoch: int, position: Mapping[str, Any], num_steps: int = 0) -> int:
        """Make the next iteration start at `position` of `epoch`, which `position` returned, at any world size.

        Returns:
            The number of steps of the epoch before `position` at this world size.
        """
        self.set_epoch(epoch)
        self._skip, self._saved = position["samples"], position
        self.start_over()
        return self._skip // self.global_batch_size

    def start_over(self) -> None:
        """Make the next iteration read the dataset from its start, whatever was read ahead in this process."""
        self._starts_over = True

    def without_marks(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of training without marks. Record how uneven steps are divided, and the dataset's states."""
        step = self._num_finished_steps or self._skip // self.global_batch_size
        for batch in batches:
            if isinstance(batch, Marked):
                mark, batch = batch, batch.batch
                if mark.state is not None:
                    self._states[step] = mark.state
                    self._states.pop(step - _NUM_STATES - self.num_workers, None)
                if (size := mark.mark.num_samples) is not None:
                    self.marks[step] = mark.mark
                    if size < self.shard.data_size:
                        reject_or_warn_about_repeated_sample(self, size, self.shard.data_size)
            step += 1
            yield batch
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
        divides_itself = self.num_workers > 1 and is_named_by(type(self.dataset), "get_worker_info")
        if divides_itself and self.shard.split == "batch" and self.shard.data_size > 1:
            raise TypeError("The ranks divide the part of each worker, and may take more steps than for the whole.")
        length = len(self.dataset)  # type: ignore[arg-type]
        num_batches = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return self.shard.num_steps(num_batches) * self.local_batch_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        worker = getattr(worker, "worker", worker)  # in a later epoch of a persistent worker
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        seed = derive_seed(self._seed.value, self._loader_index, self._epoch, self._num_iterations)
        rng, dataset = OrderRNG(seed=seed), cast(Any, self.dataset)
        saved: Mapping[str, Any] = self._saved if not self._num_iterations else {}
        num_samples_to_skip, num_missing = (0 if self._num_iterations else self._skip), 0
        self._num_iterations += 1
        beginning: list[Any] = []
        step_size = saved.get("step_size", self.global_batch_size)
        num_steps_to_skip = num_samples_to_skip // step_size
        info = _PartInfo(worker, (worker_id + num_steps_to_skip) % num_workers, self.dataset)
        if worker is not None:
            set_worker_info(info)
        states = {each["part"]: each for each in saved.get("states", ())} if self.keeps_states else {}
        fills_last_step = self.shard.remainder == "wrap" and self.shard.data_size > 1
        starts_there = None in states and not fills_last_step
        if self.keeps_states and worker is None:
            if self._at_start is None:
                self._at_start = copy.deepcopy(dataset.state_dict())
            elif self._starts_over and not starts_there:
                dataset.load_state_dict(copy.deepcopy(self._at_start))
            self._starts_over = False
        if starts_there:
            dataset.load_state_dict(states[None]["dataset"])
            rng.states = states[None]["generators"]
        state = None
        with rng.drawing():
            stream = iter(dataset)
            stream = chain(list(islice(stream, 1)), stream)
            if info.was_asked:  # and so the stream is this worker's part, of which each batch counts
                num_samples_to_skip = len(range(info.id, num_steps_to_skip, num_workers)) * step_size
                worker_id, num_workers = 0, 1
            part = info.id if info.was_asked else None
            if not starts_there:
                state = states.get(part)
                if num_samples_to_skip >= self.global_batch_size and (state is None or fills_last_step):
                    first, local, size = self._read_global_batch(stream, keep=True)
                    beginning = local or first
                    num_samples_to_skip -= size
                if state is None:
                    num_missing = num_samples_to_skip - sum(1 for _ in islice(stream, num_samples_to_skip))
        if state is not None:
            dataset.load_state_dict(state["dataset"])
            rng.states = state["generators"]
            with rng.drawing():
                stream = iter(dataset)
        had = saved.get("num_workers", self.num_workers)
        if info.was_asked and num_steps_to_skip and (had != self.num_workers or num_missing >= step_size):
            raise ConfigurationError(
                f"{type(self.dataset).__name__} divides itself by get_worker_info(). A run can continue inside an "
                f"epoch only with as many workers as before, num_workers={had} instead of {self.num_workers}, and only "
                "if none had come to its end. Resume from a checkpoint saved at the end of an epoch."
            )
        for step in count():
            mine = step % num_workers == worker_id
            with rng.drawing():
                first, local, size = self._read_global_batch(stream, mine or not step)
                own = copy.deepcopy(dataset.state_dict()) if self.keeps_states and mine else None
            beginning = beginning or local or first
            if size == self.global_batch_size or self._is_full(size):
                if own is not None and local:
                    kept = {"part": part, "dataset": own, "generators": rng.states}
                    local[-1] = Marked(local[-1], Mark(), kept)
                yield from local if mine else ()
            elif mine:
                yield from self._remainder(beginning, first, local, step, size)
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

    def _remainder(
        self, beginning: list[Any], first: list[Any], local: list[Any], step: int, size: int
    ) -> Iterable[Any]:
        """Return this rank's samples of the last global batch, which is too small to give every rank a batch."""
        if not size:
            return []
        is_padding = self.shard.remainder == "pad"
        if is_padding and not local:
            return [Marked(sample, PADDING) for sample in first[: self.local_batch_size]]
        if self.shard.split == "global":
            uneven = local or first[:1]  # a rank without a sample runs one of another rank
            had_larger = self.global_batch_size > self.shard.data_size
            mark = self.shard.mark_parts(size, 0, had_larger_steps=had_larger)
            mark = dataclasses.replace(mark, some_have_none=mark.some_have_none or is_padding)
            return [Marked(sample, mark) for sample in uneven] if size % self.shard.data_size else uneven
        if is_padding:
            return local
        if self.shard.remainder == "wrap":
            return local or beginning
        if not step and not self._skip:
            raise too_few_batches(self.dataset, self.shard.data_size)
        return []


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
        while True:
            yield None

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
        f"{type(loader.dataset).__name__} shards itself. Ranks may have different numbers of batches, so they agree "
        "before each batch whether to continue."
    )

    def iterate(batches: Iterator[Any]) -> Iterator[Any]:
        agree = partial(any_rank, group=group), partial(every_rank, group=group)
        in_step = in_lockstep(batches, cast(Batches, batches).start_over, shard, *agree)
        return _mark_all(in_step) if shard.remainder == "pad" else in_step

    try:
        length = len(loader)
    except TypeError:
        length = -1
    lengths = gather_ints(length, group)
    if min(lengths) < 0:
        return with_iteration(loader, iterate)
    return with_iteration(loader, iterate, min(lengths) if shard.remainder == "drop" else max(lengths))


def in_lockstep(
    batches: Iterator[Any],
    restart: Callable[[], Iterator[Any]],
    shard: ShardSpec,
    any_rank: Callable[[bool], bool],
    every_rank: Callable[[bool], bool],
) -> Iterator[Any]:
    """Yield the same number of batches on every rank. *Collective*, once per batch.

    With `shard.remainder="drop"`, all ranks stop when the first one runs out of batches. Otherwise they stop when the
    last one does. Until then, the others start over (`"wrap"`) or yield padding batches (`"pad"`).

    Args:
        batches: the batches of this rank.
        restart: a function that returns a new iterator over the batches of this rank.
        shard: only its `remainder` is used.
        any_rank: a function that returns whether a flag is true on any rank; *collective*.
        every_rank: a function that returns whether a flag is true on every rank; *collective*.
    """
    first_pass, last = True, None
    while True:
        batch = next(batches, _END)
        first_pass = first_pass and batch is not _END
        if not (every_rank(first_pass) if shard.remainder == "drop" else any_rank(first_pass)):
            return
        if batch is not _END:
            last = batch
        elif shard.remainder == "wrap":
            batches = restart()
            batch = next(batches, None)
        else:
            batch = Marked(last, PADDING)
        yield batch
