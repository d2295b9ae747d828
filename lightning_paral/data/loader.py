"""Copy a user's `DataLoader` so that it iterates differently, but keeps its class name and worker settings."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_paral.compat.torch.loaders import copy_without_workers, without_workers
from lightning_paral.distributed.mesh import ParallelDims

Loader = DataLoader[Any]


def samplers(loader: Loader) -> tuple[Any, ...]:
    """Return the objects that determine the order of the loader's batches, without duplicates."""
    found = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    return tuple({id(sampler): sampler for sampler in found if sampler is not None}.values())


def seed_workers_by_data_rank(loader: Loader, dims: ParallelDims) -> None:
    """Make loader workers draw random numbers of their data rank. Those of the first one are those of one process.

    After `seed_everything(workers=True)`, Lightning seeds workers by the global rank if the loader has no
    `worker_init_fn`.
    """
    users = loader.worker_init_fn
    if dims.data_rank or (users is None and int(os.environ.get("PL_SEED_WORKERS", 0))):
        loader.worker_init_fn = partial(_seed_worker, dims.data_rank, users)


def _seed_worker(data_rank: int, users: Callable[[int], None] | None, worker_id: int) -> None:
    pl_worker_init_function(worker_id, data_rank)
    if users is not None:
        users(worker_id)


def with_iteration(
    loader: Loader,
    iterate: Callable[[Iterator[Any], Callable[[], Iterator[Any]]], Iterator[Any]],
    num_batches: int | None = None,
) -> Loader:
    """Return a copy of `loader` whose iterators are made by `iterate`.

    Args:
        loader: the user's loader. It is not changed.
        iterate: called with the loader's own iterator, and with a function that returns a new one; returns an iterator
            of the copy.
        num_batches: the length of the copy; `None` for that of the loader.
    """
    changed = copy_without_workers(loader)
    changed.__class__ = _class_with(type(loader), iterate, num_batches)
    return changed


def _class_with(original: Any, iterate: Callable[..., Iterator[Any]], num_batches: int | None) -> Any:
    """Return a subclass of `original`, with the same name, whose iterators are made by `iterate`."""
    users, earlier = getattr(original, "_made_of", (original, ()))

    class Changed(original):  # type: ignore[misc]
        _made_of = users, (*earlier, (iterate, num_batches))

        def __iter__(self) -> Iterator[Any]:
            def restart() -> Iterator[Any]:
                batches: Iterator[Any] = super(Changed, self).__iter__()
                return batches

            return iterate(restart(), restart)

        def __len__(self) -> int:
            return super().__len__() if num_batches is None else num_batches

        def __reduce_ex__(self, protocol: Any) -> Any:
            # pickle looks up classes by name, and would find the user's instead of this class.
            state = without_workers(super().__reduce_ex__(protocol)[2])
            return _unpickle, Changed._made_of, state

    Changed.__name__, Changed.__qualname__, Changed.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )
    return Changed


def _unpickle(users: Any, layers: Iterable[tuple[Callable[..., Iterator[Any]], int | None]]) -> Any:
    changed = users
    for iterate, num_batches in layers:
        changed = _class_with(changed, iterate, num_batches)
    return changed.__new__(changed)
