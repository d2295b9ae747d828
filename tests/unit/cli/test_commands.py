"""The command `paral`, in this process and on one device."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_paral import STRATEGIES, ParalDDPStrategy, __version__
from lightning_paral.cli import main
from lightning_paral.distributed.process_group import release_process_group
from lightning_paral.options import Sampling

ROOT = Path(__file__).parents[3]
OVERLAYS = sorted((ROOT / "configs/strategies").glob("*.yaml"))
SHORT = {
    "model": {
        "class_path": "examples.gpt.GPT",
        "init_args": {"width": 16, "num_layers": 1, "num_heads": 2, "context": 16},
    },
    "data": {
        "class_path": "examples.gpt.StandardLibraryData",
        "init_args": {"batch_size": 2, "context": 16, "num_validation_windows": 4},
    },
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "limit_predict_batches": 2,
        "callbacks": [{"class_path": "tests.unit.cli.test_commands.Witness"}],
    },
}
FIT = {"max_steps": 2, "max_epochs": 1}


class Witness(Callback):
    """Keeps the Trainer that ran."""

    trainer: Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Witness.trainer = trainer


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str, *arguments: str, **trainer: object) -> Trainer:
    options = SHORT["trainer"] | (FIT if command == "fit" else {}) | {"default_root_dir": str(folder)} | trainer
    config = {**SHORT, "trainer": options}
    (folder / "input.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["paral", command, "--config", str(folder / "input.yaml"), *arguments])
    monkeypatch.chdir(ROOT)
    main()
    release_process_group()  # as when the process ends
    assert not dist.is_initialized()
    return Witness.trainer


@pytest.mark.parametrize("name", [entry.name for entry in STRATEGIES if entry.strategy is ParalDDPStrategy])
def test_name_in_yaml(monkeypatch, tmp_path, name: str) -> None:
    trainer = run(monkeypatch, tmp_path, "fit", strategy=name)

    assert isinstance(trainer.strategy, ParalDDPStrategy)
    assert trainer.global_step == 2


def test_class_path_in_yaml(monkeypatch, tmp_path) -> None:
    strategy = {
        "class_path": "lightning_paral.ParalDDPStrategy",
        "init_args": {"all_reduce": "ring", "wire_dtype": "bf16", "timeout": "0:05:00", "bucket_cap_mb": 5}
        | {"split": "global", "remainder": "drop", "shard_iterable": False},
    }

    trainer = run(monkeypatch, tmp_path, "fit", strategy=strategy)

    assert isinstance(trainer.strategy, ParalDDPStrategy)
    assert trainer.strategy.strategy_name == "paral_ddp_ring"
    assert trainer.strategy.timeout.total_seconds() == 300
    assert trainer.strategy._ddp_kwargs["bucket_cap_mb"] == 5
    assert trainer.strategy.sampling == Sampling(split="global", remainder="drop", shard_iterable=False)


def test_name_on_the_command_line(monkeypatch, tmp_path) -> None:
    trainer = run(monkeypatch, tmp_path, "fit", "--trainer.strategy", "paral_ddp_ring")

    assert trainer.strategy.strategy_name == "paral_ddp_ring"


@pytest.mark.parametrize("class_path", ["lightning_paral.ParalDDPStrategy", "ParalDDPStrategy"])
def test_class_path_on_the_command_line(monkeypatch, tmp_path, class_path: str) -> None:
    trainer = run(
        monkeypatch, tmp_path, "fit", f"--trainer.strategy={class_path}", "--trainer.strategy.static_graph=true"
    )

    assert isinstance(trainer.strategy, ParalDDPStrategy)
    assert trainer.strategy._ddp_kwargs["static_graph"] is True


def test_class_path_alone_on_the_command_line(monkeypatch, tmp_path) -> None:
    trainer = run(monkeypatch, tmp_path, "fit", "--trainer.strategy", "lightning_paral.ParalDDPStrategy")

    assert isinstance(trainer.strategy, ParalDDPStrategy)


OWN_STRATEGY = "examples.flat_all_reduce.FlatAllReduceStrategy"


@pytest.fixture
def own_strategy_unregistered() -> Iterator[None]:
    """Remove the name that importing the example registers, which other tests do not expect."""
    yield
    StrategyRegistry.pop("flat_all_reduce", None)


@pytest.mark.usefixtures("own_strategy_unregistered")
def test_class_path_of_a_strategy_of_the_users_own_in_yaml(monkeypatch, tmp_path) -> None:
    strategy = {"class_path": OWN_STRATEGY, "init_args": {"bucket_numel": 100, "split": "global", "timeout": 60}}

    trainer = run(monkeypatch, tmp_path, "fit", strategy=strategy)

    assert type(trainer.strategy).__name__ == "FlatAllReduceStrategy"
    assert trainer.strategy.bucket_numel == 100
    assert trainer.strategy.timeout.total_seconds() == 60
    assert trainer.strategy.sampling == Sampling(split="global")
    assert trainer.global_step == 2


@pytest.mark.usefixtures("own_strategy_unregistered")
def test_class_path_of_a_strategy_of_the_users_own_on_the_command_line(monkeypatch, tmp_path) -> None:
    options = ("--trainer.strategy.bucket_numel=100", "--trainer.strategy.remainder=drop")

    trainer = run(monkeypatch, tmp_path, "fit", f"--trainer.strategy={OWN_STRATEGY}", *options)

    assert trainer.strategy.bucket_numel == 100
    assert trainer.strategy.sampling == Sampling(remainder="drop")


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_other_commands(monkeypatch, tmp_path, command: str) -> None:
    trainer = run(monkeypatch, tmp_path, command, strategy="paral_ddp")

    assert trainer.state.fn.value == command


def test_checkpoint_with_a_type_that_only_the_strategy_knows(monkeypatch, tmp_path) -> None:
    run(monkeypatch, tmp_path, "fit", strategy="paral_ddp").save_checkpoint(tmp_path / "plain.ckpt")
    path = tmp_path / "x.ckpt"
    torch.save(torch.load(tmp_path / "plain.ckpt") | {"folder": tmp_path}, path)

    trainer = run(
        monkeypatch, tmp_path, "fit", "--ckpt_path", str(path), strategy="paral_ddp", max_steps=3, max_epochs=2
    )

    assert trainer.global_step == 3


def test_bad_input_ends_in_one_line(monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match=r"^paral: There is no strategy named 'paral_dp0'\. Did you mean 'paral_d"):
        run(monkeypatch, tmp_path, "fit", strategy="paral_dp0")


def test_strategies_prints_the_table(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["paral", "strategies"])

    main()

    printed = capsys.readouterr().out
    for entry in STRATEGIES:
        assert entry.name in printed
        assert entry.strategy.__name__ in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_version_names_what_a_report_needs(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["paral", "--version"])

    main()

    assert re.fullmatch(
        rf"lightning_paral {__version__} \(Python 3\.\S+, lightning \S+, torch {re.escape(version('torch'))}, "
        r"deepspeed \S+\)\n",
        capsys.readouterr().out,
    )


def test_bar_of_the_example_ends_with_its_run() -> None:
    trainer = yaml.safe_load((ROOT / "configs/gpt.yaml").read_text())["trainer"]

    assert trainer["limit_train_batches"] == trainer["max_steps"]


def test_unknown_command_shows_the_known_ones(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paral", "fti"])

    with pytest.raises(SystemExit, match=r"no command 'fti'(?s:.*)fit, validate, test, predict"):
        main()


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_names_a_strategy_of_ours(monkeypatch, tmp_path, overlay: Path) -> None:
    """Each overlay is parsed over the example's own configuration, up to the Trainer's options."""
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.cli import LightningCLI

    from lightning_paral.cli.train import StrategyFirstTrainer

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    arguments = ["--config", str(ROOT / "configs/gpt.yaml"), "--config", str(overlay)]
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_class=StrategyFirstTrainer,
        args=[*arguments, "--trainer.accelerator=cpu", "--trainer.logger=false"],
        run=False,
        save_config_callback=None,
    )

    assert type(cli.trainer.strategy) in {entry.strategy for entry in STRATEGIES}
