import importlib

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_paral
from lightning_paral import STRATEGIES, ParalDDPStrategy


@pytest.mark.parametrize("entry", STRATEGIES, ids=lambda entry: entry.name)
def test_trainer_builds_each_strategy_from_its_name(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PARAL_NVME_PATH", str(tmp_path))
    monkeypatch.setenv("PARAL_PERIOD", "1")
    devices = 2 if entry.name in ("paral_fsdp_tp", "paral_pp_tp") else 1
    strategy = Trainer(strategy=entry.name, accelerator="cpu", devices=devices, logger=False).strategy

    assert type(strategy) is entry.strategy
    assert StrategyRegistry[entry.name]["description"] == entry.description


def test_our_mixins_come_before_lightnings_classes() -> None:
    for strategy in {entry.strategy for entry in STRATEGIES}:
        ours = [kind.__module__.startswith("lightning_paral.") for kind in strategy.__mro__]
        assert ours == sorted(ours, reverse=True), [kind.__name__ for kind in strategy.__mro__]


def test_importing_twice_changes_nothing() -> None:
    before = dict(StrategyRegistry)

    importlib.reload(lightning_paral)
    lightning_paral.register_strategies()

    assert dict(StrategyRegistry) == before


def test_lightnings_own_names_still_work() -> None:
    assert type(Trainer(strategy="ddp", accelerator="cpu", devices=1, logger=False).strategy) is DDPStrategy
    for unknown in ("no_such_strategy", "paral_dpd", ParalDDPStrategy):
        with pytest.raises(ValueError, match="You selected an invalid strategy name"):
            Trainer(strategy=unknown)


def test_looking_up_a_name_never_raises() -> None:
    names = StrategyRegistry.available_strategies()

    assert {"ddp", *(entry.name for entry in STRATEGIES)} <= set(names)
    for asked in ("paral_dpd", "parallel", "no_such_strategy", ParalDDPStrategy, ParalDDPStrategy(), None):
        assert asked not in names


def test_names_of_others_with_our_prefix_are_left_alone() -> None:
    StrategyRegistry.register("parallel_things", DDPStrategy, description="of somebody else")
    try:
        trainer = Trainer(strategy="parallel_things", accelerator="cpu", devices=1, logger=False)
    finally:
        StrategyRegistry.remove("parallel_things")

    assert type(trainer.strategy) is DDPStrategy
