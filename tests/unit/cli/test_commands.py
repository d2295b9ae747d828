"""The command `paral`, in this process and on one device."""

import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_paral import STRATEGIES, __version__
from lightning_paral.cli.train import ConfiguredCLI
from lightning_paral.distributed.process_group import release_process_group
from lightning_paral.options import Sampling
from tests.command import run_paral

ROOT = Path(__file__).parents[3]
OVERLAYS = sorted((ROOT / "configs/strategies").glob("*.yaml"))
WITNESS = {"class_path": "tests.unit.cli.test_commands.Witness"}
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
        "callbacks": [WITNESS],
    },
}
FIT = {"max_steps": 2, "max_epochs": 1}


class Witness(Callback):
    """Records the Trainer that ran."""

    trainer: Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Witness.trainer = trainer


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str, *arguments: str, **trainer: object) -> Trainer:
    options = SHORT["trainer"] | (FIT if command == "fit" else {}) | {"default_root_dir": str(folder)} | trainer
    config = {**SHORT, "trainer": options}
    (folder / "input.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(ROOT)
    if (said := run_paral(command, "--config", str(folder / "input.yaml"), *arguments)) is not None:
        sys.exit(said)
    release_process_group()  # as at the end of the process
    assert not dist.is_initialized()
    return Witness.trainer


DDP, OWN = "lightning_paral.ParalDDPStrategy", "examples.flat_all_reduce.FlatAllReduceStrategy"
RING = {"all_reduce": "ring", "wire_dtype": "bf16", "timeout": "0:05:00", "bucket_cap_mb": 5}
SAMPLES = {"split": "global", "remainder": "drop", "shard_iterable": False}
OWN_OPTIONS = {"bucket_numel": 100, "split": "global", "timeout": 60}
GIVEN: list[tuple[Any, dict[str, Any]]] = [
    ("paral_ddp_ring", {"strategy_name": "paral_ddp_ring"}),
    (
        {"class_path": DDP, "init_args": RING | SAMPLES},
        {"strategy_name": "paral_ddp_ring", "timeout": timedelta(minutes=5), "sampling": Sampling(**SAMPLES)}
        | {"bucket_cap_mb": 5},
    ),
    (
        {"class_path": OWN, "init_args": OWN_OPTIONS},
        {"bucket_numel": 100, "timeout": timedelta(minutes=1), "sampling": Sampling(split="global")},
    ),
    (["--trainer.strategy=ParalDDPStrategy", "--trainer.strategy.static_graph=true"], {"static_graph": True}),
    (
        [f"--trainer.strategy={OWN}", "--trainer.strategy.bucket_numel=100", "--trainer.strategy.remainder=drop"],
        {"bucket_numel": 100, "sampling": Sampling(remainder="drop")},
    ),
]
"""Values of `strategy` in YAML, or arguments of the command line, with attributes of the strategy that is made."""


@pytest.fixture
def _own_strategy_unregistered() -> Iterator[None]:
    """Remove the name that importing the example registers, which other tests do not expect."""
    yield
    StrategyRegistry.pop("flat_all_reduce", None)


@pytest.mark.usefixtures("_own_strategy_unregistered")
@pytest.mark.parametrize(("given", "attributes"), GIVEN, ids=str)
def test_strategy_by_name_and_by_class(monkeypatch, tmp_path, given: Any, attributes: dict[str, Any]) -> None:
    arguments, options = (given, {}) if isinstance(given, list) else ((), {"strategy": given})

    trainer = run(monkeypatch, tmp_path, "fit", *arguments, **options)

    of_ddp = getattr(trainer.strategy, "_ddp_kwargs", {})
    assert {name: of_ddp.get(name, getattr(trainer.strategy, name, None)) for name in attributes} == attributes
    assert type(trainer.strategy).__name__ == ("FlatAllReduceStrategy" if OWN in str(given) else "ParalDDPStrategy")
    assert trainer.global_step == 2


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_other_commands_run(monkeypatch, tmp_path, command: str) -> None:
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


def test_strategies_prints_the_table(capsys) -> None:
    assert run_paral("strategies") is None

    printed = capsys.readouterr().out
    assert all(entry.name in printed and entry.strategy.__name__ in printed for entry in STRATEGIES)
    assert max(map(len, printed.splitlines())) <= 100


def test_version_prints_the_versions_for_a_bug_report(capsys) -> None:
    assert run_paral("--version") is None

    printed = capsys.readouterr().out
    assert printed.startswith(f"lightning_paral {__version__} (Python 3.")
    assert all(f"{name} {version(name)}" in printed for name in ("lightning", "torch", "deepspeed"))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_names_a_strategy_of_ours(monkeypatch, overlay: Path) -> None:
    monkeypatch.chdir(ROOT)

    made = ConfiguredCLI(["--config", "configs/gpt.yaml", "--config", str(overlay)]).trainer_options["strategy"]

    assert made in {entry.name for entry in STRATEGIES} or type(made) in {entry.strategy for entry in STRATEGIES}
