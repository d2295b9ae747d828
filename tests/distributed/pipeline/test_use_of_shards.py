"""Shards of a stage in use: what a rank holds, hooks, averages and readers, failures and refusals."""

import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_paral import ConfigurationError, ParalDDPStrategy, ParalPipelineStrategy
from lightning_paral.checkpoint.shards import FlatShard
from tests.distributed.pipeline.test_shards import TWO_BY_TWO, Sharded, assert_close, weights_of
from tests.models.chain import NUM_BLOCKS, WIDTH, Chain, Regression, loader
from tests.running import quiet_trainer

# What a rank holds


SIZE = 256
"""The parameters of `Wide` are then most of the memory of a rank."""


class Wide(Regression):
    """Has an embedding and a head that are each as large as the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(NUM_BLOCKS * SIZE, SIZE)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)) for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(SIZE, NUM_BLOCKS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first((x[:, 0].abs() * 10).long())))[:, :3]


def live_bytes() -> int:
    """Return the size of all tensors of this process, each memory once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_meta]
    with_memory = [each for each in tensors if not isinstance(each, DTensor | FlatShard)]
    # Gradients that only C++ has used are not among the objects of Python yet. Other tensors are not asked for theirs:
    # a view whose base was changed in place raises an error.
    gradients = [each.grad for each in with_memory if isinstance(each, nn.Parameter) and each.grad is not None]
    sizes: dict[int, int] = {}
    for each in (*with_memory, *gradients):
        with suppress(RuntimeError, NotImplementedError):  # tensors of torch without memory
            sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(sizes.values())


class Held(Callback):
    """Measures the tensors of a rank after the second optimizer step."""

    def __init__(self) -> None:
        self.before = live_bytes()
        self.after: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            time.sleep(0.2)  # until the thread of gloo forgets the bucket that it reduced last
            self.after.append(live_bytes() - self.before)


def held_by_a_rank(num_ranks: int, options: dict[str, Any]) -> list[int]:
    held = Held()
    trainer = quiet_trainer(devices=num_ranks, strategy=Sharded(**options), max_steps=2, callbacks=[held])
    trainer.fit(Wide(), loader(2), loader(1))
    return held.after


@pytest.mark.parametrize(
    ("num_ranks", "options", "num_ends"),
    [(2, {}, 2), (4, TWO_BY_TWO, 2), (2, {"first_stage": ["first"], "last_stage": ["head"]}, 1)],
    ids=str,
)
def test_a_rank_holds_its_stage_or_its_shard_of_it(
    on_ranks, num_ranks: int, options: dict[str, Any], num_ends: int
) -> None:
    of_stage = (NUM_BLOCKS // 2 + num_ends * NUM_BLOCKS) * SIZE * SIZE
    expected = 4 * of_stage // (num_ranks // 2) * 4  # bytes: weights, their gradients and two moments

    for after in on_ranks(num_ranks, held_by_a_rank, num_ranks, options):
        assert after == [pytest.approx(expected, rel=0.1)]


# Hooks of users


class Uses(Chain):
    """Reads and changes parameters and gradients, freezes and unfreezes, in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        gradients = [self.out.weight.grad, self.first.bias.grad]
        self.seen += [float(each.norm()) for each in gradients if each is not None]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.back.weight.clamp_(-0.3, 0.3)
        self.first.bias.requires_grad_(batch_idx % 3 != 1)

    def on_train_batch_start(self, *args: Any) -> None:
        self.shift.data.clamp_(-0.05, 0.05)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.state_dict()  # would reshard the parameters before they are used
        super().validation_step(batch, batch_idx)


class Reads(Callback):
    """Reads full tensors between steps."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == 1:
            for parameter in list(pl_module.parameters()):
                gradient = strategy.full_gradient(parameter)
                self.read += [strategy.full_parameter(parameter), *([] if gradient is None else [gradient])]
            self.read.append(strategy.gradient_norm())

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        trained = [block.inner.weight for number, block in enumerate(pl_module.blocks) if number != 1]
        self.read += [strategy.full_optimizer_state(each, "exp_avg") for each in (pl_module.out.weight, *trained)]


def used(strategy: Any, world_size: int, path: str) -> Any:
    torch.manual_seed(3)
    module = Uses()
    reads = Reads()
    options: dict[str, Any] = {"max_epochs": 1, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(
        devices=world_size, strategy=strategy, callbacks=[reads, WeightAveraging(avg_fn=_mean)], **options
    )
    trainer.fit(module, loader(6), loader(2))
    trainer.save_checkpoint(path)
    (validated,) = trainer.validate(module, loader(2), verbose=False)
    return [each.cpu() for each in reads.read], module.seen, weights_of(module), validated


def _mean(average: Tensor, current: Tensor, number: Any) -> Tensor:
    return average + (current - average) * 0.5


@pytest.mark.parametrize("options", [TWO_BY_TWO, {"stages": 2}], ids=str)
def test_hooks_averages_and_readers_are_those_of_one_process(on_ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    one_process = ParalDDPStrategy(find_unused_parameters=True)
    whole, seen, weights, validated = used(one_process, 1, str(tmp_path / "1"))

    for results in on_ranks(4, used, Sharded(checkpoint="full", **options), 4, str(tmp_path / "4")):
        for found, expected in zip(results[0], whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert results[1] == pytest.approx(seen, rel=1e-4)
        assert results[3] == pytest.approx(validated, rel=1e-5)
        assert_close(results[2], weights)
    (found,), (expected,) = (torch.load(tmp_path / name, weights_only=False)["optimizer_states"] for name in ("4", "1"))
    assert found["state"].keys() == expected["state"].keys()
    for number, values in found["state"].items():
        torch.testing.assert_close(values, expected["state"][number], rtol=1e-4, atol=1e-6)


# Failures and refusals


class KeepsClones(Chain):
    """Keeps clones of weights in an attribute, which are DTensors on one stage and empty on the other."""

    def on_train_start(self) -> None:
        self.clones = {name: p.detach().clone() for name, p in self.blocks[3].named_parameters()}


class Finetuned(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Unfreezes(BaseFinetuning):
    """Trains a block of each stage from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze([pl_module.blocks[0], pl_module.blocks[3]])  # type: ignore[index]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.blocks[0], pl_module.blocks[3]], optimizer, lr=1e-2)  # type: ignore[index]


def fit_keeping(sharded: bool, world_size: int) -> list[Any]:
    weights = []
    for make, callbacks in ((KeepsClones, []), (Finetuned, [Unfreezes()])):
        torch.manual_seed(3)
        strategy: Any = Sharded(**TWO_BY_TWO) if sharded else "auto"
        trainer = quiet_trainer(devices=world_size, strategy=strategy, max_epochs=2, callbacks=list(callbacks))
        module = make()
        trainer.fit(module, loader(4), loader(1))
        weights.append(weights_of(module))
    return weights


def test_clones_of_shards_and_finetuning_train_as_in_one_process(on_ranks) -> None:
    expected = fit_keeping(False, 1)

    for found in on_ranks(4, fit_keeping, True, 4, timeout=60.0):
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs)


class HasTwoDtypes(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


class UsesLBFGS(Chain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refusals() -> list[str]:
    messages = []
    for make, options in (
        (Chain, {"stages": 2, "shard": 4}),
        (Chain, {"stages": 4, "shard": True}),
        (HasTwoDtypes, {**TWO_BY_TWO, "units": ["Block"]}),
        (UsesLBFGS, TWO_BY_TWO),
    ):
        with pytest.raises(ConfigurationError) as error:
            quiet_trainer(devices=4, strategy=Sharded(**options), max_steps=1).fit(make(), loader(1))
        messages.append(str(error.value))
    return messages


def test_impossible_shards_are_refused_on_all_ranks(on_ranks) -> None:
    expected = (
        "shard=4 does not divide the 2 rank(s) of each of the 2 stage(s). Choose one of 1, 2",
        "shard=True shards each stage over its ranks, but with 4 stages on 4 ranks, each stage has one rank",
        "Trained parameters of one unit must have the same dtype, but in blocks.3 there are",
        "LBFGS cannot update sharded parameters",
    )

    for messages in on_ranks(4, refusals):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)


def test_shard_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="shard"):
        ParalPipelineStrategy(stages=2, shard=0)
