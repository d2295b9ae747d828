"""Every kind of loader that Lightning takes is evaluated as in one process, on one rank and on two."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_paral import ConfigurationError
from tests.models.linear import Linear
from tests.running import quiet_trainer

NUM_SAMPLES, BATCH_SIZE = 14, 2


def samples() -> Tensor:
    return torch.arange(1.0, NUM_SAMPLES + 1).unsqueeze(1)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from samples()


class SizedStream(Stream):
    def __len__(self) -> int:
        return NUM_SAMPLES


class Generated:
    """An iterable that is not a `DataLoader` and has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from samples().split(BATCH_SIZE)


def indexed(num: int = NUM_SAMPLES) -> DataLoader[Any]:
    return DataLoader(samples()[:num], BATCH_SIZE)  # type: ignore[arg-type]


def stream(kind: type[Stream] = Stream, **options: Any) -> DataLoader[Any]:
    return DataLoader(kind(), BATCH_SIZE, **options)


LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "indexed": (indexed, {}),
    "stream": (stream, {}),
    "sized stream": (lambda: stream(SizedStream), {}),
    "stream without batches": (lambda: DataLoader(Stream(), batch_size=None), {}),
    "stream, dropping its last": (lambda: DataLoader(Stream(), 4, drop_last=True), {}),
    "list of loaders": (lambda: [indexed(), stream(), indexed(4)], {}),
    "dict of loaders": (lambda: {"a": indexed(), "b": stream()}, {}),
    "in turns": (lambda: CombinedLoader([indexed(), stream()], "sequential"), {}),
    "the longest": (lambda: CombinedLoader({"a": indexed(), "b": indexed(4)}, "max_size"), {}),
    "the shortest": (lambda: CombinedLoader([indexed(), indexed(4)], "min_size"), {}),
    "streams at once": (lambda: CombinedLoader([stream(), stream()], "min_size"), {}),
    "limited by number": (stream, {"batches": 3}),
    "limited by part": (indexed, {"batches": 0.5}),
    "sized stream limited by part": (lambda: stream(SizedStream), {"batches": 0.5}),
    "sanity steps": (stream, {"num_sanity_val_steps": 2}),
    "own sampler": (lambda: DataLoader(samples(), BATCH_SIZE, sampler=[3, 1, 5]), {}),  # type: ignore[arg-type]
}
PLAIN: dict[str, Callable[[], Any]] = {
    "list of tensors": lambda: list(samples().split(BATCH_SIZE)),
    "own iterable": Generated,
    "list in a list": lambda: CombinedLoader([list(samples().split(BATCH_SIZE))], "sequential"),
}
"""Iterables without a sampler, which neither Lightning's ddp nor our strategies divide among ranks."""


class Sums(Linear):
    """Adds up its samples by loader."""

    def __init__(self) -> None:
        super().__init__(1, lr=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0].view(-1, 1)).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        for name, part in zip(("first", "second"), parts, strict=False):
            if part is not None:
                assert isinstance(part, Tensor)
                self.log(name, part.sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)


def sums_of(strategy: str, devices: int, name: str) -> dict[str, Any]:
    loader, options = LOADERS[name] if name in LOADERS else (PLAIN[name], {})
    options = dict(options)
    limit = options.pop("batches", 1.0)
    torch.manual_seed(1)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=1, limit_val_batches=limit, limit_train_batches=1, **options
    )
    trainer.fit(Sums(), indexed(), loader())
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def sums_on_rank(strategy: str, devices: int, names: list[str]) -> dict[str, Any]:
    return {name: sums_of(strategy, devices, name) for name in names}


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp"])
def test_one_device_evaluates_the_same_samples_as_lightning(on_ranks, strategy: str) -> None:
    names = [*LOADERS, *PLAIN]
    (found,) = on_ranks(1, sums_on_rank, strategy, 1, names)
    assert found == {name: sums_of("auto", 1, name) for name in names}


def test_dp_evaluates_the_same_samples_as_one_device() -> None:
    names = [name for name in (*LOADERS, *PLAIN) if name != "stream without batches"]  # it cannot be divided
    assert sums_on_rank("paral_dp", 2, names) == sums_on_rank("auto", 1, names)


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp"])
def test_two_ranks_evaluate_each_sample_once(on_ranks, strategy: str) -> None:
    names = [name for name in LOADERS if not name.startswith(("limited", "sized stream limited"))]
    for found in on_ranks(2, sums_on_rank, strategy, 2, names):
        assert found == {name: sums_of("auto", 1, name) for name in names}


# A distributed sampler under DP


def seen_under_dp(loader: Any) -> Any:
    class Keeps(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.extend(batch[0].flatten().tolist())
            return super().training_step(batch, batch_idx)

    seen: list[float] = []
    quiet_trainer(strategy="paral_dp", devices=2, max_epochs=1).fit(Keeps(), loader)
    return sorted(seen)


def test_plain_iterables_are_not_divided_and_a_warning_says_so(on_ranks) -> None:
    for found in on_ranks(2, sums_of_plain_iterable, "paral_ddp"):
        assert found == on_ranks(2, sums_of_plain_iterable, "ddp")[0]


def sums_of_plain_iterable(strategy: str) -> dict[str, Any]:
    said = pytest.warns(UserWarning, match="Generated is not a DataLoader") if strategy != "ddp" else nullcontext()
    with said if dist.get_rank() == 0 else nullcontext():
        return sums_of(strategy, 2, "own iterable")


def test_every_sample_is_drawn_under_dp() -> None:
    assert seen_under_dp(DataLoader(TensorDataset(samples()), 4, shuffle=True)) == samples().flatten().tolist()
    own = DistributedSampler(TensorDataset(samples()), num_replicas=1, rank=0)
    assert seen_under_dp(DataLoader(TensorDataset(samples()), 4, sampler=own)) == samples().flatten().tolist()


def test_samplers_for_several_processes_are_refused_under_dp() -> None:
    trainer = quiet_trainer(strategy="paral_dp", devices=2)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    half = DistributedSampler(TensorDataset(samples()), num_replicas=trainer.num_devices, rank=trainer.global_rank)
    with pytest.raises(ConfigurationError, match=r"DistributedSampler\(num_replicas=2\).*distributed_sampler_kwargs"):
        seen_under_dp(DataLoader(TensorDataset(samples()), 4, sampler=half))
