"""Every kind of loader is evaluated as in one process, each sample once, and predictions are gathered in order."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_paral import ConfigurationError, GatherPredictions, ParalDDPStrategy
from tests.models.linear import Linear
from tests.models.recorded import Indices, Recorder, fit, flat, trainer_of
from tests.models.recorded import Stream as Numbers
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


class Divided(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from samples()[rank::world_size]


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
    "one sample": (lambda: indexed(1), {}),
    "stream": (stream, {}),
    "sized stream": (lambda: stream(SizedStream), {}),
    "stream without batches": (lambda: DataLoader(Stream(), batch_size=None), {}),
    "stream, dropping its last": (lambda: DataLoader(Stream(), 4, drop_last=True), {}),
    "list of loaders": (lambda: [indexed(), stream(), indexed(4)], {}),
    "dict of loaders": (lambda: {"a": indexed(), "b": stream()}, {}),
    "in turns": (lambda: CombinedLoader([indexed(), stream()], "sequential"), {}),
    "the longest": (lambda: CombinedLoader({"a": indexed(), "b": indexed(8)}, "max_size"), {}),
    "the shortest": (lambda: CombinedLoader([indexed(), indexed(4)], "min_size"), {}),
    "streams at once": (lambda: CombinedLoader([stream(), stream()], "min_size"), {}),
    "limited by number": (stream, {"limit_val_batches": 3}),
    "sized stream limited by part": (lambda: stream(SizedStream), {"limit_val_batches": 0.5}),
    "sanity steps": (stream, {"num_sanity_val_steps": 2}),
    "own sampler": (lambda: DataLoader(samples(), BATCH_SIZE, sampler=[3, 1, 5]), {}),  # type: ignore[arg-type]
}
COMBINED = ("the longest", "the shortest", "streams at once")
"""Several loaders at once, which several ranks evaluate only if they have batches for all of them in each step."""
PLAIN: dict[str, Callable[[], Any]] = {
    "list of tensors": lambda: list(samples().split(BATCH_SIZE)),
    "own iterable": Generated,
    "list in a list": lambda: CombinedLoader([list(samples().split(BATCH_SIZE))], "sequential"),
}
"""Iterables without a sampler, which neither Lightning's ddp nor our strategies divide among ranks."""


class Sums(Linear):
    """Logs sums and means of its samples by loader."""

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
                size = len(part)
                self.log(f"{name}_mean", part.mean(), on_step=True, on_epoch=True, sync_dist=True, batch_size=size)


class Synchronizing(Sums):
    """Calls a collective when it logs."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.reduce(torch.ones(()))
        super().log(*args, **kwargs)


def values_of(strategy: Any, devices: int, name: str, module: type[Sums] = Sums) -> dict[str, Any]:
    make, options = LOADERS[name] if name in LOADERS else (PLAIN[name], {})
    torch.manual_seed(1)
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=1, limit_train_batches=1, **options)
    trainer.fit(module(), indexed(), make())
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def values_on_rank(strategy: str, devices: int, names: list[str]) -> dict[str, Any]:
    return {name: values_of(strategy, devices, name) for name in names}


def values_of_divided() -> dict[str, Any]:
    trainer = quiet_trainer(strategy=ParalDDPStrategy(shard_iterable=False), devices=dist.get_world_size())
    return trainer.validate(Sums(), stream(Divided), verbose=False)[0]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp"])
def test_one_device_evaluates_the_same_samples_as_lightning(on_ranks, strategy: str) -> None:
    names = [*LOADERS, *PLAIN]
    (found,) = on_ranks(1, values_on_rank, strategy, 1, names)
    assert found == {name: values_of("auto", 1, name) for name in names}


def test_dp_evaluates_the_same_samples_as_one_device() -> None:
    names = [name for name in (*LOADERS, *PLAIN) if name != "stream without batches"]  # it cannot be divided
    expected = values_on_rank("auto", 1, names)
    for name, found in values_on_rank("paral_dp", 2, names).items():
        assert found == pytest.approx(expected[name])


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp"])
def test_ranks_evaluate_each_sample_once(on_ranks, strategy: str) -> None:
    names = [name for name in LOADERS if "limited" not in name and name not in COMBINED]
    for found in on_ranks(3, values_on_rank, strategy, 3, names, timeout=60.0):
        for name in names:
            assert found[name] == pytest.approx(values_of("auto", 1, name)), name
    expected = quiet_trainer().validate(Sums(), stream(), verbose=False)[0]
    assert on_ranks(3, values_of_divided) == [pytest.approx(expected)] * 3


def test_padding_joins_the_collectives_of_an_overridden_log(on_ranks) -> None:
    found = on_ranks(2, values_of, "paral_fsdp", 2, "indexed", Synchronizing)
    assert found == [pytest.approx(values_of("auto", 1, "indexed"))] * 2


@pytest.mark.parametrize("name", COMBINED)
def test_loaders_evaluated_at_once_are_refused_if_ranks_have_different_numbers_of_batches(on_ranks, name: str) -> None:
    with pytest.raises(Exception, match="Return a list of loaders"):
        on_ranks(3, values_of, "paral_ddp", 3, name)


def test_plain_iterables_are_not_divided_and_a_warning_says_so(on_ranks) -> None:
    for found in on_ranks(2, values_of_plain_iterable, "paral_ddp"):
        assert found == on_ranks(2, values_of_plain_iterable, "ddp")[0]


def values_of_plain_iterable(strategy: str) -> dict[str, Any]:
    said = pytest.warns(UserWarning, match="Generated is not a DataLoader") if strategy != "ddp" else nullcontext()
    with said if dist.get_rank() == 0 else nullcontext():
        return values_of(strategy, 2, "own iterable")


# In a fit


def evaluated_in_fit() -> tuple[dict[str, float], list[float]]:
    validation = [DataLoader(Indices(4), 2), DataLoader(Indices(1), 1)]
    stopping = EarlyStopping("own/dataloader_idx_1", patience=5)
    model = fit(DataLoader(Indices(12), 2), validation, callbacks=[stopping], max_epochs=2)
    return model.metrics, flat(model.evaluated.get(1, []))


def test_evaluation_in_a_fit_counts_each_sample_once(on_ranks) -> None:
    ranks = on_ranks(3, evaluated_in_fit)
    for metrics, _ in ranks:
        assert metrics["mean/dataloader_idx_0"] == 1.5
        assert metrics["own/dataloader_idx_1"] == 0.0  # also on ranks without a sample
        assert metrics["train"] == 5.5
    assert flat([seen for _, seen in ranks]) == [0.0] * 3  # the sanity check, and two epochs


# Predictions


def predicted(split: str) -> list[Any]:
    loaders: list[Any] = [DataLoader(Indices(7), 2), DataLoader(Numbers(7), 3), DataLoader(Indices(7), None)]
    trainer = trainer_of(split, callbacks=[GatherPredictions()])
    return [[torch.as_tensor(each).tolist() for each in trainer.predict(Recorder(), loader)] for loader in loaders]


@pytest.mark.parametrize("split", ["batch", "global"])
def test_predictions_are_those_of_one_process_in_order(on_ranks, split: str) -> None:
    expected = [[[0, 1], [2, 3], [4, 5], [6]], [[0, 1, 2], [3, 4, 5], [6]], list(range(7))]
    assert on_ranks(3, predicted, split) == [expected] * 3


# Refused, or under DP


class DrawsItself(Recorder):
    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        next(dataloader_iter)


def fail_to_draw() -> str:
    with pytest.raises(ConfigurationError) as raised:
        trainer_of().validate(DrawsItself(), DataLoader(Indices(7), 2))
    return str(raised.value)


def test_evaluation_with_dataloader_iter_is_refused(on_ranks) -> None:
    for message in on_ranks(2, fail_to_draw):
        assert "DrawsItself.validation_step takes a `dataloader_iter`" in message


def seen_under_dp(loader: Any) -> Any:
    class Keeps(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.extend(batch[0].flatten().tolist())
            return super().training_step(batch, batch_idx)

    seen: list[float] = []
    quiet_trainer(strategy="paral_dp", devices=2, max_epochs=1).fit(Keeps(), loader)
    return sorted(seen)


def test_dp_draws_every_sample_and_refuses_samplers_for_several_processes() -> None:
    dataset = TensorDataset(samples())
    own = DistributedSampler(dataset, num_replicas=1, rank=0)
    for options in ({"shuffle": True}, {"sampler": own}):
        assert seen_under_dp(DataLoader(dataset, 4, **options)) == samples().flatten().tolist()
    half = DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match=r"DistributedSampler\(num_replicas=2\).*distributed_sampler_kwargs"):
        seen_under_dp(DataLoader(dataset, 4, sampler=half))
