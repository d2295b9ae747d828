"""Iterable datasets and loaders with `state_dict` and `load_state_dict` continue by their own states."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, IterableDataset

from tests.models.recorded import fit, flat
from tests.running import SaveAt

LENGTH, STEPS = 26, 3


class Continuing(IterableDataset[torch.Tensor]):
    """Yields numbers plus a random one. Continues where an iteration was left, as a connection to a server does."""

    def __init__(self, length: int) -> None:
        self.length, self.position, self.num_loaded = length, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < self.length:
            self.position += 1
            yield self.position + torch.rand(()) / 2
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.num_loaded += 1


def run(num_workers: int, folder: str, *, saves: bool) -> list[Any]:
    """Fit two epochs; return the samples that this rank has trained on, after the checkpoint if it resumes."""
    torch.manual_seed(1)
    dataset = Continuing(LENGTH)
    options = {"multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(dataset, 2, num_workers=num_workers, **options)
    path = f"{folder}/{num_workers}.ckpt"
    resumes = {"callbacks": [SaveAt(STEPS, path)]} if saves else {"ckpt_path": path}
    trained = fit(loader, max_epochs=2, **resumes).trained
    assert bool(dataset.num_loaded) == (not num_workers and not saves)  # the states of workers are not known
    return trained


def interrupted(folder: str) -> list[list[Any]]:
    return [run(num_workers, folder, saves=True) for num_workers in (0, 2)]


def resumed(folder: str) -> list[list[Any]]:
    return [run(num_workers, folder, saves=False) for num_workers in (0, 2)]


def test_stream_continues_by_its_own_state_at_any_number_of_ranks(on_ranks, tmp_path) -> None:
    whole = on_ranks(2, interrupted, str(tmp_path))
    expected = flat([step for pair in zip(*(rank[0][STEPS:] for rank in whole), strict=True) for step in pair])

    for rank, found in zip(whole, on_ranks(2, resumed, str(tmp_path)), strict=True):
        assert found == [all_steps[STEPS:] for all_steps in rank]
    (found,) = on_ranks(1, resumed, str(tmp_path))
    assert flat(found[0])[:8] == expected[:8]


def around_the_end(hook: str, path: str) -> Any:
    def fitted(**options: Any) -> list[float]:
        torch.manual_seed(1)
        loader = DataLoader(Continuing(7), 2)
        return flat(fit(loader, DataLoader([torch.zeros(1)]), max_epochs=2, **options).trained)

    def save(trainer: Any, module: Any) -> None:
        if not trainer.current_epoch and not trainer.sanity_checking:
            trainer.save_checkpoint(path)

    whole = fitted(callbacks=[LambdaCallback(**{hook: save})])
    resumed = fitted(ckpt_path=path, callbacks=[SaveAt(6, f"{path}-again")])
    return whole, resumed, fitted(ckpt_path=f"{path}-again")


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_nothing_that_was_read_ahead_is_lost_at_the_end_of_an_epoch(on_ranks, tmp_path, hook: str) -> None:
    ((whole, resumed, again),) = on_ranks(1, around_the_end, hook, str(tmp_path / "end.ckpt"))

    assert [int(each) for each in whole] == [*range(1, 8)] * 2
    assert resumed == whole[7:]
    assert again == whole[11:]  # from the middle of the epoch with which the first resumed fit began


class Own(DataLoader[float]):
    """A loader that the strategy does not divide, with a state of its own, and no length, so that it is read ahead."""

    def __init__(self) -> None:
        super().__init__([])
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 8:
            self.position += 1
            yield torch.tensor([100.0 * dist.get_rank() + self.position])
        self.position = 0

    def __len__(self) -> int:
        raise TypeError

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"] + 100 * (dist.get_world_size() < 2)


def of_own_loader(path: str) -> Any:
    options = {"use_distributed_sampler": False}
    whole = fit(Own(), callbacks=[SaveAt(STEPS, path)], **options).trained
    return whole, fit(Own(), ckpt_path=path, **options).trained


def warnings_of_another_size(path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Own(), ckpt_path=path, use_distributed_sampler=False)
    return [str(each.message) for each in caught]


def test_loader_that_is_not_divided_continues_by_the_state_of_its_rank(on_ranks, tmp_path) -> None:
    path = str(tmp_path / "own.ckpt")
    for rank, (whole, resumed) in enumerate(on_ranks(2, of_own_loader, path)):
        assert flat(whole) == [100.0 * rank + index for index in range(1, 9)]
        assert resumed == whole[STEPS:]

    (messages,) = on_ranks(1, warnings_of_another_size, path)
    assert any("the states of the training loaders of 2 ranks, but this run has 1" in message for message in messages)


def of_torchdata(path: str) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    whole = fit(StatefulDataLoader(Continuing(LENGTH), 2), callbacks=[SaveAt(STEPS, path)]).trained
    return whole, fit(StatefulDataLoader(Continuing(LENGTH), 2), ckpt_path=path).trained


def test_loader_of_torchdata_continues_once(on_ranks, tmp_path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    for whole, found in on_ranks(2, of_torchdata, str(tmp_path / "torchdata.ckpt")):
        assert found == whole[STEPS:]
