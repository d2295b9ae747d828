"""Ranks with different settings, modules or optimizers raise an error that names the first difference and the ranks."""

import os
from typing import Any

import pytest

from tests.contract.cases import PER_PLACEMENT, labels, strategy_of, with_ranks
from tests.distributed.divergence.modules import BuiltDifferently, Differing, error_of, fit, loader
from tests.running import quiet_trainer

CASES = with_ranks(PER_PLACEMENT, 2)
MODULES = {
    "shape": "Parameter `head.weight` has shape (8, 10) on rank 0 and (12, 10) on rank 1",
    "missing": "Parameter `head.bias` exists on rank 0 only",
    "dtype": "Parameter `head.bias` has dtype torch.float32 on rank 0 and torch.float64 on rank 1",
    "frozen": "Parameter `head.bias` has requires_grad True on rank 0 and False on rank 1",
    "buffer": "Buffer `table` has shape (4,) on rank 0 and (5,) on rank 1",
}
BUILT = {
    "size": "Parameter `head.weight` has shape (8, 10) on rank 0 and (12, 10) on rank 1",
    "more": "Parameter `extra.weight` exists on rank 1 only",
    "fewer": "Parameter `head.weight` exists on rank 0 only",
}
OPTIMIZERS = {
    "class": "Optimizer 0 is torch.optim.adamw.AdamW on rank 0 and torch.optim.sgd.SGD on rank 1",
    "lr": "Param group 0 of optimizer 0 (AdamW) has lr 0.1 on rank 0 and 0.2 on rank 1",
    "weight_decay": "has weight_decay 0.01 on rank 0 and 0.5 on rank 1",
    "groups": "has parameters body.weight, body.bias, head.weight, head.bias on rank 0 and body.weight, body.bias on",
}
SETTINGS: dict[str, tuple[Any, Any]] = {
    "accumulate_grad_batches": (2, 4),
    "gradient_clip_val": (0.5, None),
    "max_epochs": (1, 2),
    "max_steps": (5, 3),
    "limit_train_batches": (2, 3),
    "check_val_every_n_epoch": (1, 2),
    "val_check_interval": (2, 1),
    "precision": ("32-true", "bf16-mixed"),
}


def fit_differing(strategy: str, kind: str) -> str:
    return fit(strategy, Differing(kind, int(os.environ["RANK"])), {})


def validate_differing(strategy: str, kind: str) -> str:
    trainer = quiet_trainer(strategy=strategy_of(strategy), devices=2)
    return error_of(lambda: trainer.validate(Differing(kind, int(os.environ["RANK"])), loader(), verbose=False))


def fit_built_differently(kind: str) -> str:
    return fit("paral_zero3", BuiltDifferently(kind, int(os.environ["RANK"])), {})


def fit_with(name: str) -> str:
    return fit("paral_ddp", Differing("", 0), {}, **{name: SETTINGS[name][int(os.environ["RANK"])]})


@pytest.mark.parametrize("kind", MODULES | OPTIMIZERS)
@pytest.mark.parametrize("strategy", labels(CASES))
def test_different_module_or_optimizer_is_named_on_all_ranks(on_ranks: Any, strategy: str, kind: str) -> None:
    for message in on_ranks(2, fit_differing, strategy, kind):
        assert message.startswith("ConfigurationError: ")
        assert (MODULES | OPTIMIZERS)[kind] in message


@pytest.mark.parametrize("strategy", labels(CASES))
def test_different_module_is_named_before_validation(on_ranks: Any, strategy: str) -> None:
    for message in on_ranks(2, validate_differing, strategy, "shape"):
        assert MODULES["shape"] in message


@pytest.mark.parametrize("kind", ["", *BUILT])
def test_different_module_is_named_while_it_is_built_partitioned(on_ranks: Any, kind: str) -> None:
    for message in on_ranks(2, fit_built_differently, kind):
        assert BUILT[kind] in message if kind else message == ""


@pytest.mark.parametrize("name", SETTINGS)
def test_different_setting_is_named_on_all_ranks(on_ranks: Any, name: str) -> None:
    first, second = SETTINGS[name]
    for message in on_ranks(2, fit_with, name):
        assert f"{name} is {first} on rank 0 and {second} on rank 1" in message
