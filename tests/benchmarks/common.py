"""What benchmarks share: silence, ranks, the times of steps, and the table that they print."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tabulate import tabulate

from lightning_paral.diagnostics.rank_pool import RankPool

OnRanks = Callable[..., list[Any]]
"""A function, called as `on_ranks(num_ranks, function, *arguments)`, that returns the result of each rank."""


def silence() -> None:
    """Show no warnings, and none of Lightning's messages."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@contextmanager
def silent_ranks() -> Iterator[OnRanks]:
    """Provide processes that run functions as ranks, and silence in them and here."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    silence()
    pool = RankPool()
    try:
        yield lambda num_ranks, *call: pool.run(num_ranks, _silently, *call, timeout=900.0)
    finally:
        pool.close()


def _silently(function: Callable[..., Any], *arguments: Any) -> Any:
    silence()
    return function(*arguments)


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table. Only rank 0 of the ranks of torchrun prints."""
    if os.environ.get("RANK", "0") == "0":
        print(tabulate(rows, headers="keys"))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], floatfmt: str | Sequence[str]) -> None:
    """Print a table."""
    print(tabulate(rows, headers=headers, floatfmt=floatfmt))


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the storages behind `tensors`, each once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())
