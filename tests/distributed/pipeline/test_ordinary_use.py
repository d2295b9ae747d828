"""What users do besides training gives the same in a pipeline: epochs, metrics, hooks, prediction, dropout, memory."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_paral import ParalPipelineStrategy, RankFailedError
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.models.chain import (
    FEATURES,
    GLOBAL_BATCH_SIZE,
    NUM_BLOCKS,
    WIDTH,
    Block,
    Chain,
    Losses,
    fit_chain,
    loader,
)
from tests.running import quiet_trainer


def strategy_for(world_size: int, **options: Any) -> Any:
    return ParalPipelineStrategy(split="global", **options) if world_size > 1 else "auto"


class Collects(Chain):
    """Collects outputs in containers, and has torchmetrics as attributes and as a logged object."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.counts = {"samples": 0}
        self.total = torch.zeros(3)
        self.mean_error = MeanMetric()
        self.logged_error = MeanMetric()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.outputs.append(loss.detach())
        self.counts["samples"] += len(batch[0])
        self.total += loss.detach()
        self.mean_error.update(loss)
        self.logged_error.update(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("logged_error", self.logged_error)

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack(self.outputs).mean()
        self.log("mean", mean, sync_dist=True)
        self.log("mean_error", self.mean_error.compute())
        self.mean_error.reset()
        self.seen += [len(self.outputs), self.counts["samples"], *self.total.tolist()]
        self.outputs.clear()
        self.counts["samples"] = 0  # in each epoch, steps give it the same value again


def fit_and_evaluate(world_size: int, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    module = Collects()
    _, module, trainer = fit_chain(strategy_for(world_size, **options), world_size, module=module, max_epochs=2)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(module, loader(3), verbose=False)
    predicted = torch.cat(trainer.predict(module, loader(2)))  # type: ignore[arg-type]
    return metrics, validated, module.seen, predicted


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {}), (4, {"schedule": "gpipe"}), (2, {"schedule": "interleaved"})]
)
def test_collected_outputs_metrics_and_predictions_are_those_of_one_process(
    on_ranks, world_size: int, options: dict[str, Any]
) -> None:
    metrics, validated, seen, predicted = fit_and_evaluate(1, {})

    for found in on_ranks(world_size, fit_and_evaluate, world_size, options):
        assert found[0].keys() == metrics.keys()
        for name in metrics:
            if name != "calls":  # adds up the values of the micro-batches
                assert found[0][name] == pytest.approx(metrics[name], rel=1e-5), name
        assert found[1] == pytest.approx(validated, rel=1e-5)
        assert found[2] == pytest.approx(seen, rel=1e-5)
        torch.testing.assert_close(found[3], predicted, rtol=1e-5, atol=1e-6)


class Caches(Block):
    """Registers a buffer in its first call, and takes a count, which the code between the blocks changes."""

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.full((3,), 2.0))
        return super().forward(x) / count, count.clone()


class KeepsContainers(Chain):
    """Has sets of modules and parameters, which are not data, and a `Counter`, which is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caches() for _ in range(NUM_BLOCKS))
        self.slow = {self.first.weight, self.out.weight}
        self.frozen = {self.blocks[0]}
        self.counter = Counter[str]()
        self.counted: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x, count = torch.tanh(self.first(x)), torch.ones((), dtype=torch.long)
        for block in self.blocks:
            x, count = block(x, count)
            count += 1
        return self.out(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.counter["batches"] += 1

    def on_train_epoch_start(self) -> None:
        for parameter in (self.first.weight, self.out.weight):
            if parameter in self.slow:
                parameter.data.mul_(0.5)

    def on_validation_epoch_end(self) -> None:
        self.counted.append(self.counter["batches"])


def fit_with_containers(strategy: Any, world_size: int, save_to: Any) -> Any:
    _, module, _ = fit_chain(strategy, world_size, module=KeepsContainers, max_epochs=2, save_to=save_to)
    return module.counted, {name: value.cpu() for name, value in module.state_dict().items()}


def test_containers_caches_and_counts_of_units_are_those_of_one_process(on_ranks, tmp_path) -> None:
    counted, weights = fit_with_containers("auto", 1, tmp_path / "one.ckpt")

    for found, of_rank in on_ranks(2, fit_with_containers, strategy_for(2), 2, tmp_path / "two.ckpt"):
        assert found == counted
        torch.testing.assert_close(of_rank, weights, rtol=0.0, atol=1e-5)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * GLOBAL_BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.full((FEATURES,), random.random()), torch.full((3,), np.random.rand())


class DrawsAtItsEnd(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if random.random() < np.random.rand():
            self.log("sometimes", loss)
        return loss


def drawn_batches() -> list[float]:
    sums: list[float] = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, *args: Any) -> None:
            sums.append(float(batch[0].sum() + batch[1].sum()))

    seed_everything(5)
    trainer = quiet_trainer(devices=2, strategy="paral_pp", max_epochs=1, callbacks=[Keep()])
    trainer.fit(DrawsAtItsEnd(), DataLoader(Augmented(), GLOBAL_BATCH_SIZE))
    return sums


def test_numbers_that_only_the_last_stage_draws_leave_all_stages_the_same_batches(on_ranks) -> None:
    one, other = on_ranks(2, drawn_batches)

    assert one == other
    assert len(set(one)) == 4


class BuiltLate(Chain):
    """Built in `configure_model`."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.is_built = False

    def configure_model(self) -> None:
        if self.is_built:
            return
        self.is_built = True
        torch.manual_seed(11)
        chain = Chain()
        for name, child in chain.named_children():
            setattr(self, name, child)
        for name, parameter in chain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)


class DropsOut(Chain):
    """Records the masks that blocks draw, and random numbers that the step draws before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.drawn: list[float] = []
        for block in self.blocks:
            block.register_forward_hook(self._drop)

    def _drop(self, block: Block, inputs: Any, output: Tensor) -> Tensor:
        mask = torch.rand(WIDTH) < 0.5
        self.masks.append(mask)
        return output * mask * 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return self._loss(batch)


def masks_of(strategy: ParalPipelineStrategy) -> Any:
    torch.manual_seed(5)
    module = DropsOut()
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=3, logger=False)
    kept: list[Any] = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            kept.append((list(pl_module.masks), list(pl_module.drawn)))
            pl_module.masks.clear()
            pl_module.drawn.clear()

    trainer.callbacks.append(Keep())  # type: ignore[attr-defined]
    trainer.fit(module, loader(3))
    return kept


def test_units_draw_different_masks_on_each_stage_and_the_step_the_same_numbers(on_ranks) -> None:
    one, other = on_ranks(2, masks_of, ParalPipelineStrategy(micro_batches=2, check_steps=False))

    all_masks = []
    for (masks, drawn), (other_masks, other_drawn) in zip(one, other, strict=True):
        assert drawn == other_drawn
        all_masks += [tuple(mask.tolist()) for mask in (*masks, *other_masks)]
    assert len(all_masks) == 3 * 2 * NUM_BLOCKS
    assert len(set(all_masks)) > len(all_masks) / 2  # 7 bits each: few coincide by chance


class Fails(Chain):
    """Fails in a block of the first or the last stage."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.blocks[number].register_forward_hook(self._fail)

    def _fail(self, *args: Any) -> None:
        if self.trainer.global_step == 1:
            raise RuntimeError("made to fail")


def fit_failing(number: int) -> str:
    trainer = quiet_trainer(devices=2, strategy=ParalPipelineStrategy(split="global"), max_steps=3)
    with pytest.raises((RuntimeError, RankFailedError)) as error:
        trainer.fit(Fails(number), loader(3))
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("number", [0, NUM_BLOCKS - 1])
def test_failure_of_a_stage_ends_all(number: int) -> None:
    pool = RankPool()
    try:
        messages = pool.run(2, fit_failing, number)
    finally:
        pool.close()

    assert sum(each.startswith("RuntimeError: made to fail") for each in messages) == 1
    assert sum(each.startswith("RankFailedError") and "made to fail" in each for each in messages) == 1


def shapes_of(world_size: int) -> list[float]:
    """Fit on batches whose sizes change, of which some have fewer samples than there are micro-batches."""
    torch.manual_seed(3)
    module, losses = Chain(), Losses()
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(size, FEATURES, generator=generator), torch.randn(size, 3, generator=generator))
        for size in (12, 5, 1, 9, 3)
    ]
    strategy: Any = "auto" if world_size == 1 else "paral_pp"
    trainer = quiet_trainer(devices=world_size, strategy=strategy, max_epochs=1, callbacks=[losses])
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return losses.values


def test_batches_of_any_size_give_the_losses_of_one_process(on_ranks) -> None:
    expected = shapes_of(1)

    for losses in on_ranks(2, shapes_of, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
