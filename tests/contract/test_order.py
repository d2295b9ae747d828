"""With `split="global"`, batches equal those of one process with the same seed, for every sampler and generator."""

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_paral.data import sampler as order
from tests.contract.cases import strategy_of
from tests.running import SaveAt, quiet_trainer

NUM_SAMPLES = 22
CASES: tuple[dict[str, Any], ...] = (
    *(
        {"seed": seed, "validation": validation, "generator": generator}
        for seed, validation, generator in product((1,), ("", "plain", "shuffled"), (False, True))
    ),
    {"seed": 2, "validation": "shuffled"},
    {"seed": 3, "validation": "shuffled", "workers": 2},
    *({"seed": 4, "sampler": kind, "validation": "plain"} for kind in ("weighted", "one by one", "replacement")),
    {"seed": 5, "everything": True, "validation": "plain"},
    {"seed": 6, "sampler": "one by one", "batch_size": 4, "num_samples": 4 * 18, "epochs": 2, "chunk": 16},
)


class OneByOne(Sampler[int]):
    """Draws each index on request."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))

    def __len__(self) -> int:
        return self.length


class Numbers(Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])

    def __len__(self) -> int:
        return self.length


class Listening(LightningModule):
    """Records the samples of each batch, and draws no random numbers after construction."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch[:, 0].int().tolist())
        return self.layer(batch * 0.01).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(batch[:, 0].int().tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(label: str, num_devices: int, case: dict[str, Any], **more: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Fit on shuffled batches; return the samples of each batch of this rank, for training and for validation."""
    (seed_everything if case.get("everything") else torch.manual_seed)(case["seed"])
    module = Listening()
    length, batch_size = case.get("num_samples", NUM_SAMPLES), case.get("batch_size", 8)
    samplers = {
        "weighted": lambda: WeightedRandomSampler(torch.linspace(1, 2, length), length),
        "one by one": lambda: OneByOne(length),
        "replacement": lambda: RandomSampler(range(length), replacement=True),
    }
    sampler = samplers[case["sampler"]]() if "sampler" in case else None
    generator = torch.Generator().manual_seed(case["seed"]) if case.get("generator") else None
    options = {"generator": generator, "num_workers": case.get("workers", 0)}
    loader = DataLoader(Numbers(length), batch_size, shuffle=sampler is None, sampler=sampler, **options)
    validation = case.get("validation")
    loaders = [loader, DataLoader(Numbers(5), 4, shuffle=validation == "shuffled")] if validation else [loader]
    strategy = strategy_of(label, **({} if label == "one process" else {"split": "global"}))
    save_at, ckpt_path = more.pop("save_at", None), more.pop("ckpt_path", None)
    callbacks = [SaveAt(*save_at)] if save_at else []
    settings = {"max_epochs": case.get("epochs", 3), "devices": num_devices, "callbacks": callbacks} | more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_CHUNK", case.get("chunk", order._CHUNK))
        quiet_trainer(strategy=strategy, **settings).fit(module, *loaders, ckpt_path=ckpt_path)
    return module.seen, module.validated


def fit_all(label: str, num_devices: int) -> list[Any]:
    return [fit(label, num_devices, case) for case in CASES]


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return the samples of each global batch."""
    return [sorted(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def expected(rank_pool) -> list[Any]:
    """The batches of one process under Lightning's own strategy."""
    (found,) = rank_pool.run(1, fit_all, "one process", 1, timeout=300)
    return found


@pytest.mark.parametrize(
    ("label", "world_size"),
    [("paral_ddp", 1), ("paral_ddp", 2), ("paral_ddp", 4), ("paral_fsdp", 2), ("paral_zero2", 2)],
)
def test_batches_equal_those_of_one_process(on_ranks, expected: list[Any], label: str, world_size: int) -> None:
    ranks = on_ranks(world_size, fit_all, label, world_size, timeout=300)
    for number, case in enumerate(CASES):
        assert joined([rank[number][0] for rank in ranks]) == joined([expected[number][0]]), case
    orders = [str(drawn) for (drawn, _), case in zip(expected, CASES, strict=True) if "generator" not in case]
    assert len(set(orders)) == len(orders), "cases must differ in their order"


def test_single_rank_draws_as_one_process_for_any_split(on_ranks, expected: list[Any]) -> None:
    ((seen, _),) = on_ranks(1, fit_of_batches, CASES[0])
    assert seen == expected[0][0]


def fit_of_batches(case: dict[str, Any]) -> Any:
    torch.manual_seed(case["seed"])
    module = Listening()
    trainer = quiet_trainer(strategy="paral_ddp", devices=1, max_epochs=3)
    trainer.fit(module, DataLoader(Numbers(NUM_SAMPLES), 8, shuffle=True))
    return module.seen, module.validated


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step", [1, 3, 4])
@pytest.mark.parametrize("generator", [False, True])
def test_resuming_continues_with_the_batches_of_one_process(
    on_ranks, expected: list[Any], tmp_path, world_size: int, step: int, generator: bool
) -> None:
    case = {"seed": 1, "validation": "plain", "generator": generator}
    (all_batches,) = [batches for other, (batches, _) in zip(CASES, expected, strict=True) if other == case]
    path = str(tmp_path / "x.ckpt")
    on_ranks(2, fit_and_save, case, step, path)
    ranks = on_ranks(world_size, fit_resumed, world_size, case | {"seed": 99, "generator": generator}, path)
    assert joined([rank[0] for rank in ranks]) == joined([all_batches])[step:]


def fit_and_save(case: dict[str, Any], step: int, path: str) -> Any:
    return fit("paral_ddp", 2, case, save_at=(step, path), max_steps=step)


def fit_resumed(num_devices: int, case: dict[str, Any], path: str) -> Any:
    return fit("paral_ddp", num_devices, case, ckpt_path=path)
