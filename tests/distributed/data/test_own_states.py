"""Iterable datasets and loaders with `state_dict` and `load_state_dict` continue by their own states."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.models.recorded import fit, flat
from tests.running import SaveAt

LENGTH, STEPS = 26, 3
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


class Stateful(IterableDataset[torch.Tensor]):
    """Yields numbers plus a random one, from the state that was loaded."""

    def __init__(self, *, divides: bool = False) -> None:
        self.divides = divides
        self.position, self.continues, self.num_loaded = 0, False, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        part, num_parts = 0, 1
        if self.divides and (info := get_worker_info()) is not None:
            part, num_parts = info.id, info.num_workers
        if not self.continues:
            self.position = part
        self.continues = False
        while self.position < LENGTH:
            index = self.position
            self.position += num_parts
            yield index + torch.rand(()) / 2

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.continues = state["position"], True
        self.num_loaded += 1


def run(kind: str, folder: str = "", *, saves: bool = False) -> list[Any]:
    """Fit two epochs; return the samples that this rank has trained on, after the checkpoint if it resumes."""
    torch.manual_seed(1)
    dataset = Stateful(divides=kind == "divided")
    loader = DataLoader(dataset, 2, **(WORKERS if kind != "plain" else {}))
    path = f"{folder}/{kind}.ckpt"
    options = {"callbacks": [SaveAt(STEPS, path)]} if saves else {"ckpt_path": path} if folder else {}
    trained = fit(loader, remainder="drop" if kind == "plain" else "wrap", max_epochs=2, **options).trained
    assert bool(dataset.num_loaded) == (kind == "plain" and bool(folder) and not saves)
    return trained


KINDS = ["plain", "workers", "divided"]


def interrupted(folder: str) -> list[list[Any]]:
    return [run(kind, folder, saves=True) for kind in KINDS]


def resumed(folder: str) -> list[list[Any]]:
    return [run(kind, folder)[:4] for kind in KINDS]


def test_stream_continues_by_its_own_state(on_ranks, tmp_path) -> None:
    whole = on_ranks(2, interrupted, str(tmp_path))

    for rank, found in zip(whole, on_ranks(2, resumed, str(tmp_path)), strict=True):
        for kind, all_steps, later in zip(KINDS, rank, found, strict=True):
            assert later == all_steps[STEPS : STEPS + 4], kind


def test_stream_continues_by_its_own_state_at_another_number_of_ranks(on_ranks, tmp_path) -> None:
    whole = on_ranks(2, interrupted, str(tmp_path))
    expected = flat([step for pair in zip(*(rank[0][STEPS:] for rank in whole), strict=True) for step in pair])

    (found,) = on_ranks(1, resumed, str(tmp_path))

    assert flat(found[0]) == expected[:8]


class Continuing(IterableDataset[torch.Tensor]):
    """Continues where the last iteration ended, as a connection to a server does."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 7:
            self.position += 1
            yield torch.tensor(float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveIn(Callback):
    """Saves a checkpoint in a hook at the end of the first epoch, in its validation or after it."""

    def __init__(self, hook: str, path: str) -> None:
        self.hook, self.path = hook, path

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer, "on_train_epoch_end")

    def save(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and not trainer.current_epoch and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


def around_the_end(hook: str, path: str) -> Any:
    def fitted(**options: Any) -> list[Any]:
        return fit(DataLoader(Continuing(), 2), DataLoader([torch.zeros(1)]), max_epochs=2, **options).trained

    return fitted(callbacks=[SaveIn(hook, path)]), fitted(ckpt_path=path)


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_nothing_that_was_read_ahead_is_lost_at_the_end_of_an_epoch(on_ranks, tmp_path, hook: str) -> None:
    ((whole, resumed),) = on_ranks(1, around_the_end, hook, str(tmp_path / "end.ckpt"))

    assert flat(whole) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] * 2
    assert flat(resumed) == flat(whole)[7:]


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

    whole = fit(StatefulDataLoader(Stateful(), 2), callbacks=[SaveAt(STEPS, path)]).trained
    return whole, fit(StatefulDataLoader(Stateful(), 2), ckpt_path=path).trained


def test_loader_of_torchdata_continues_once(on_ranks, tmp_path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    for whole, found in on_ranks(2, of_torchdata, str(tmp_path / "torchdata.ckpt")):
        assert found == whole[STEPS:]
