"""Iterable datasets that divide themselves by `get_worker_info()` give what they give in one process."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_paral import ConfigurationError
from tests.models.recorded import fit, flat
from tests.running import SaveAt

NUM_SAMPLES = 26


class Divides(IterableDataset[float]):
    """Yields this worker's samples, of which the first worker has more. Asks when the first one is drawn."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[float]:
        worker = get_worker_info()
        part, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from (float(i) for i in range(self.num_samples) if min(i % (num_workers + 1), num_workers - 1) == part)


class Sized(Divides):
    def __len__(self) -> int:
        return self.num_samples


class Ignores(Divides):
    def __iter__(self) -> Iterator[float]:
        assert get_worker_info() is not None
        yield from map(float, range(self.num_samples))


Seen = tuple[list[list[float]], list[float], float]


def run(
    split: str | None, dataset: Any, num_workers: int, epochs: int = 1, combined: bool = False, **more: Any
) -> Seen:
    """Return the training batches, the validated samples and their mean. Without `split`, fit in one process."""
    torch.manual_seed(1)
    loader: Any = DataLoader(dataset, 2, num_workers=num_workers, persistent_workers=epochs > 1)
    validation = DataLoader(dataset, 2, num_workers=num_workers)
    if combined:
        loader = CombinedLoader([loader, validation], "max_size")
    more |= {"split": split} if split else {"strategy": "auto"}
    model = fit(loader, validation, max_epochs=epochs, num_sanity_val_steps=0, **more)
    trained = [flat(batch) for batch in model.trained]
    return trained, flat(list(model.evaluated.values())), model.metrics.get("mean", 0.0)


CASES: dict[str, tuple[Any, ...]] = {
    "no worker": (Divides(), 0),
    "one worker": (Divides(), 1),
    "two workers": (Divides(), 2),
    "two epochs": (Divides(), 2, 2),
    "combined": (Divides(), 2, 1, True),
    "with a length": (Sized(24), 2),
}


def joined(ranks: Any) -> list[list[float]]:
    return [sorted(set(chain.from_iterable(parts))) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize("case", CASES)
def test_each_sample_is_used_once_and_global_batches_equal_those_of_one_process(
    on_ranks, case: str, split: str
) -> None:
    ((trained, validated, mean),) = on_ranks(1, run, None, *CASES[case])
    ranks = on_ranks(2, run, split, *CASES[case])

    found, whole = joined([rank[0] for rank in ranks]), joined([trained])
    assert found == whole if split == "global" else set(chain(*found)) == set(chain(*whole))
    assert sorted(ranks[0][1] + ranks[1][1]) == sorted(validated)
    assert [rank[2] for rank in ranks] == pytest.approx([mean] * 2)


@pytest.mark.parametrize(("split", "size"), [("batch", 4), ("global", 2)])
def test_samples_of_a_dataset_that_does_not_divide_itself_are_divided(on_ranks, split: str, size: int) -> None:
    ranks = on_ranks(2, run, split, Ignores(), 2)

    assert joined([rank[0] for rank in ranks])[0] == list(range(size))


@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_run_continues_inside_an_epoch(on_ranks, tmp_path, split: str, step: int) -> None:
    path = str(tmp_path / "x.ckpt")
    whole = on_ranks(2, partial(run, split, Divides(), 2, callbacks=[SaveAt(step, path)]))
    resumed = on_ranks(2, partial(run, split, Divides(), 2, ckpt_path=path))

    for rank, uninterrupted in zip(resumed, whole, strict=True):
        assert rank[0] == uninterrupted[0][step:]


def error_of_resumed(num_workers: int, path: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        run("global", Divides(), num_workers, ckpt_path=path)
    return str(raised.value)


@pytest.mark.parametrize(("step", "num_workers"), [(2, 3), (11, 2)])
def test_positions_in_parts_that_are_not_known_are_refused(on_ranks, tmp_path, step: int, num_workers: int) -> None:
    path = str(tmp_path / "x.ckpt")
    on_ranks(2, partial(run, "global", Divides(), 2, callbacks=[SaveAt(step, path)]))

    for message in on_ranks(2, error_of_resumed, num_workers, path):
        assert "Divides divides itself by get_worker_info()" in message
