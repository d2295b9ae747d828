"""Features of `ParalFSDPStrategy` besides training as in one process."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_paral import ConfigurationError, ParalFSDPStrategy
from lightning_paral.model import host_memory_check as room
from tests.models.blocks import Block, OnTheModule, Tied
from tests.models.tokens import LENGTH, VOCABULARY, Fitted, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 4


class Watched(OnTheModule):
    """Evaluates, predicts, and calls itself in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        tokens = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            self.seen += [self(tokens).sum().item(), self.embedding(tokens).sum().item()]


def everything(num_ranks: int, strategy: Any) -> list[Any]:
    torch.manual_seed(5)
    model = Watched()
    parameters, hooks = dict(model.named_parameters()), len(model._forward_hooks)
    results: list[Any] = []
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, gradient_clip_val=0.5)
    loader = token_loader(NUM_BATCHES, num_ranks)
    for name in ("validate", "fit", "predict", "test", "fit", "validate"):
        if name == "predict":
            results.append(torch.cat(trainer.predict(model, loader)).mean().item())
        elif name == "fit":
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(model, loader, loader)
        else:
            results.append(getattr(trainer, name)(model, loader, verbose=False)[0]["loss"])
        assert type(model) is Watched
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
        assert len(model._forward_hooks) == hooks
        assert not [attribute for attribute in vars(model) if "fsdp" in attribute]
    return [*results, *model.seen]


def everything_on_rank() -> list[Any]:
    return everything(2, "paral_fsdp")


def test_all_trainer_functions_run_in_any_order_and_restore_the_module(on_ranks) -> None:
    expected = everything(1, "auto")

    ranks = on_ranks(2, everything_on_rank)

    mean = [sum(values) / 2 for values in zip(*ranks, strict=True)]
    assert mean == pytest.approx(expected, rel=1e-5)


class FailsOnce(Tied):
    """Fails in the third step of its first fit."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        if self.num_steps == 3:
            raise ArithmeticError("the reason")
        return loss


def fit_after_failure(num_ranks: int, strategy: Any) -> Any:
    torch.manual_seed(5)
    model = FailsOnce()
    with pytest.raises(ArithmeticError, match="the reason"):
        quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy).fit(model, token_loader(4, num_ranks))
    assert model(torch.zeros(1, LENGTH, dtype=torch.int64)).shape == (1, LENGTH, VOCABULARY)
    return fit(lambda: model, NUM_BATCHES, num_ranks, strategy=strategy)


def fit_after_failure_on_rank() -> Any:
    return fit_after_failure(2, "paral_fsdp")


def test_module_has_full_parameters_and_trains_after_a_failed_fit(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_after_failure_on_rank), fit_after_failure(1, "auto"))


class ReadsGradients(OnTheModule):
    """Logs norms before clipping, reads full gradients, and clips in its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy, sharded = self.trainer.strategy, isinstance(self.trainer.strategy, ParalFSDPStrategy)
        gradients = [p.grad for p in self.parameters()]
        if sharded:
            assert {type(gradient) for gradient in gradients} == {DTensor, Tensor}
            self.read.append(strategy.gradient_norm())
            self.read += [strategy.full_gradient(p).clone() for p in self.parameters()]
        else:
            self.read.append(torch.stack([gradient.norm() for gradient in gradients]).norm())
            self.read += [gradient.clone() for gradient in gradients]

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        clipped = [p.grad for p in self.parameters()]
        self.read += [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in clipped]

    def on_train_batch_end(self, *_: Any) -> None:
        strategy, optimizer = self.trainer.strategy, self.optimizers().optimizer
        if isinstance(strategy, ParalFSDPStrategy):
            self.read += [strategy.full_optimizer_state(p, "exp_avg") for p in self.parameters()]
            self.read += [strategy.full_parameter(p) for p in self.parameters()]
        else:
            self.read += [optimizer.state[p]["exp_avg"].clone() for p in self.parameters()]
            self.read += [p.detach().clone() for p in self.parameters()]


def read_gradients(num_ranks: int, **options: Any) -> list[Tensor]:
    models: list[ReadsGradients] = []

    def make() -> ReadsGradients:
        models.append(ReadsGradients())
        return models[0]

    fit(make, 2, num_ranks, **options)
    return models[0].read


def read_gradients_on_rank(num_ranks: int, replicate: int) -> list[Tensor]:
    return read_gradients(num_ranks, strategy=ParalFSDPStrategy(replicate=replicate))


@pytest.mark.parametrize(("num_ranks", "replicate"), [(2, 1), (4, 2)])
def test_hooks_see_and_clip_the_gradients_of_one_process(on_ranks, num_ranks: int, replicate: int) -> None:
    expected = read_gradients(1)

    for read in on_ranks(num_ranks, read_gradients_on_rank, num_ranks, replicate):
        for ours, theirs in zip(read, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "keep gathered": {"reshard_after_forward": False},
    "reshard the root, too": {"reshard_after_forward": True},
    "reshard to two ranks": {"reshard_after_forward": 2},
    "prefetch": {"prefetch": 2},
    "predicate": {"units": lambda name, module: name.startswith("blocks.") and name.count(".") == 1},
    "class": {"units": Block},
    "nested": {"units": [Block, "Linear"]},
    "offload": {"offload": True, "replicate": 2},
}


def fit_with_options(label: str, num_ranks: int) -> Any:
    return fit(OnTheModule, NUM_BATCHES, num_ranks, gradient_clip_val=0.5, strategy=ParalFSDPStrategy(**OPTIONS[label]))


@cache
def fit_in_one_process() -> Any:
    return fit(OnTheModule, NUM_BATCHES, 1, gradient_clip_val=0.5)


@pytest.mark.parametrize("label", OPTIONS)
def test_options_do_not_change_results(on_ranks, label: str) -> None:
    assert_same_fit(on_ranks(4, fit_with_options, label, 4), fit_in_one_process())


def fit_with_accumulation(num_ranks: int, **options: Any) -> Any:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3, **options}
    return fit(OnTheModule, 5, num_ranks, **options)


def fit_with_accumulation_on_rank(accumulate: Any, replicate: int) -> Any:
    return fit_with_accumulation(4, strategy=ParalFSDPStrategy(accumulate=accumulate, replicate=replicate))


@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("accumulate", ["sharded", "unsharded"])
def test_accumulation_with_a_partial_window(on_ranks, accumulate: str, replicate: int) -> None:
    ranks = on_ranks(4, fit_with_accumulation_on_rank, accumulate, replicate)

    assert_same_fit(ranks, fit_with_accumulation(1))


def fit_in_precision(strategy: Any, precision: Any) -> list[float]:
    return fit(OnTheModule, 8, 2, strategy=strategy, precision=precision, gradient_clip_val=0.5)[0]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 1e-2), ("bf16-true", 3e-2)])
def test_low_precision_is_close_to_ddp(on_ranks, precision: str, tolerance: float) -> None:
    ddp = on_ranks(2, fit_in_precision, "paral_ddp", precision)
    fsdp = on_ranks(2, fit_in_precision, "paral_fsdp", precision)
    exact = on_ranks(2, fit_in_precision, "paral_fsdp", "32-true")

    for ours, theirs, full in zip(fsdp, ddp, exact, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
        assert ours != full


class SavesTheFirstEpoch(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(Path(self.folder, "epoch-0"))


def fit_saving(folder: str, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(5)
    model = OnTheModule()
    trainer = quiet_trainer(
        max_epochs=2, devices=2, strategy="paral_fsdp", gradient_clip_val=0.5, callbacks=[SavesTheFirstEpoch(folder)]
    )
    trainer.fit(model, token_loader(3, 2), ckpt_path=ckpt_path)
    trainer.save_checkpoint(Path(folder, "late"))
    return model.losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def test_training_resumes_from_a_checkpoint(on_ranks, tmp_path: Path) -> None:
    whole = on_ranks(2, fit_saving, str(tmp_path))
    resumed = on_ranks(2, fit_saving, str(tmp_path), str(tmp_path / "epoch-0"))

    for (losses, weights), (losses_again, weights_again) in zip(whole, resumed, strict=True):
        assert losses_again == losses[3:]
        assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items())


class Normalised(Fitted):
    """Has a BatchNorm, whose saved statistics are those of rank 0's samples, as under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(LENGTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()
        )
        self.norm = nn.LayerNorm(LENGTH)
        self.out = nn.Linear(16, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].float() / VOCABULARY
        return nn.functional.mse_loss(self.out(self.layers(self.norm(inputs))).squeeze(1).float(), inputs.sum(dim=1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def fit_normalised(strategy: Any, precision: Any) -> Any:
    return fit(Normalised, NUM_BATCHES, 2, strategy=strategy, precision=precision)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 5e-2)])
def test_batchnorm_equals_that_under_ddp(on_ranks, precision: str, tolerance: float) -> None:
    ddp = on_ranks(2, fit_normalised, "paral_ddp", precision)
    fsdp = on_ranks(2, fit_normalised, "paral_fsdp", precision)

    expected = ddp[0][1]  # under DDP, other ranks keep their own last update of the statistics
    for (losses, _), (ddp_losses, _) in zip(fsdp, ddp, strict=True):
        assert losses == pytest.approx(ddp_losses, rel=2 * tolerance)
        if precision == "32-true":
            torch.testing.assert_close(losses, ddp_losses, rtol=1e-5, atol=0.0)
    for name, weight in fsdp[0][1].items():
        assert (weight - expected[name]).abs().max() <= tolerance, name
    for name in ("layers.1.weight", "layers.1.bias"):
        assert torch.equal(fsdp[0][1][name], fsdp[1][1][name])


class Compiled(Tied):
    """Has blocks compiled by a backend that only captures graphs, which shows graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


def fit_compiled_on_rank() -> Any:
    return fit(Compiled, NUM_BATCHES, 2, strategy="paral_fsdp")


def test_compiled_blocks_train(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_compiled_on_rank), fit(Tied, NUM_BATCHES, 1))


def logged_in_two_fits(logger: logging.Logger) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        trainer = quiet_trainer(max_steps=1, devices=2, strategy=ParalFSDPStrategy())
        trainer.fit(Tied(), token_loader(1, 2))
        trainer.fit(Tied(), token_loader(1, 2))
    finally:
        logger.removeHandler(handler)
    return lines


def printed_tree() -> list[str]:
    lines = logged_in_two_fits(logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    return [line for line in lines if line.startswith("FSDP: ")]


def test_units_are_printed_once_with_their_sizes(on_ranks) -> None:
    (tree,), nothing = on_ranks(2, printed_tree)

    assert nothing == []
    assert tree == (
        "FSDP: 4 units over 2 ranks\n"
        "Tied (the root): 320 parameters, 1.25 KiB\n"
        "└─ blocks.0 ... blocks.2 (Block): 3 x 1,632 parameters, 6.38 KiB"
    )


def logged_at_info() -> list[str]:
    logger = logging.getLogger("lightning_paral.engines.fsdp")
    before, _ = logger.level, logger.setLevel(logging.INFO)
    try:
        return logged_in_two_fits(logger)
    finally:
        logger.setLevel(before)


def test_each_rank_logs_its_shards_at_info(on_ranks) -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in Tied().parameters())

    for lines in on_ranks(2, logged_at_info):
        assert lines == [f"module sharded: Tied, 4 units, {num_bytes} bytes unsharded"] * 2


def fit_without_room() -> tuple[str, str]:
    model, (probe, room.available_bytes) = Tied(), (room.available_bytes, lambda: 2 * 4 * 5000)
    trainer = quiet_trainer(max_steps=1, devices=2, strategy="paral_fsdp")
    try:
        trainer.fit(model, token_loader(1, 2))
    finally:
        room.available_bytes = probe
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(model, token_loader(1, 2))
    return type(next(model.parameters())).__name__, str(caught.value)


def test_model_larger_than_host_memory_stays_sharded(on_ranks) -> None:
    for kind, message in on_ranks(2, fit_without_room):
        assert kind == "DTensor"
        assert "2 ranks per node would need" in message
        assert "Load a checkpoint" in message
