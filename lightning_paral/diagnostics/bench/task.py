"""What a benchmark trains: the module and the data of a LightningCLI configuration, or a small Transformer."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jsonargparse import get_loader
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_paral.diagnostics.bench.transformer import RandomTokenData, SmallTransformer
from lightning_paral.errors import ConfigurationError

_DEFAULT: dict[str, Any] = {
    name: {"class_path": f"{cls.__module__}.{cls.__qualname__}"}
    for name, cls in (("model", SmallTransformer), ("data", RandomTokenData))
}
_KEPT = ("precision", "gradient_clip_val", "gradient_clip_algorithm")
_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A module, its data, and the options of the Trainer that change what a step computes."""

    module: LightningModule
    data: LightningDataModule | None
    """`None` if the module has the dataloader."""
    trainer_options: dict[str, Any] = field(default_factory=dict)

    def make_loader(self) -> Any:
        """Return the training dataloader, without a Trainer."""
        if self.data is None:
            return self.module.train_dataloader()
        self.data.setup("fit")
        return self.data.train_dataloader()

    def make_trainer(
        self, strategy: str | Strategy, device: torch.device, num_ranks: int, callback: Callback, **limits: Any
    ) -> Trainer:
        """Return a Trainer that trains this task on this rank and prints nothing.

        Args:
            strategy: a name, or a strategy.
            device: the device of this rank.
            num_ranks: the number of ranks, all on this machine.
            callback: what measures.
            **limits: `max_steps` or `max_epochs`.
        """
        return Trainer(
            strategy=strategy,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=num_ranks,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            callbacks=[callback],
            **_QUIET,
            **self.trainer_options,
            **limits,
        )


def check_config(path: str) -> None:
    """Check that a configuration can be read and has what a benchmark needs, without creating anything.

    Raises:
        ConfigurationError: it cannot be read, or names no model.
    """
    _read(path)


def check_overrides(overrides: Sequence[str]) -> None:
    """Check that all overrides are options of the module or the data.

    Raises:
        ConfigurationError: one is not.
    """
    for text in overrides:
        if text.startswith("-") and not text.startswith(("--model", "--data")) and not _is_number(text):
            raise ConfigurationError(
                f"There is no option {text.partition('=')[0]!r}. `paral bench COMMAND --help` lists the options; "
                "beside them, there are those of the module and the data, such as --model.width 1024."
            )
    if overrides and not overrides[0].startswith("-"):
        raise ConfigurationError(f"{overrides[0]!r} belongs to no option. Lists have commas and no spaces.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def import_classes(config: str | None, overrides: Sequence[str] = ()) -> None:
    """Import the modules of the classes that a configuration names, without creating anything.

    Errors are left to `make_task`, which has the words for them.
    """
    described = _DEFAULT if config is None else _read(config)
    paths = [part.get("class_path", "") for part in described.values() if isinstance(part, dict)]
    for path in [*paths, *overrides]:
        if "." in path and not path.startswith("-"):
            with suppress(ImportError, ValueError):
                import_module(path.rpartition(".")[0])


def make_task(config: str | None, overrides: Sequence[str] = ()) -> Task:
    """Create the task. Random numbers are seeded, so that all strategies compute the same.

    Args:
        config: the path of a configuration; `None` for the small Transformer.
        overrides: options of the module and the data on a command line, such as `["--model.width", "1024"]`.

    Raises:
        ConfigurationError: the configuration does not describe a module with data.
    """
    seed_everything(0, verbose=False)
    found = _DEFAULT if config is None else _read(config)
    source = "The options of the benchmark" if config is None else f"--config {config}"
    options = {name: value for name, value in (found.get("trainer") or {}).items() if name in _KEPT}
    described: dict[str, Any] = {name: found[name] for name in ("model", "data") if name in found}
    has_data = "data" in described or any(text.startswith("--data") for text in overrides)
    described["trainer"] = {**_QUIET, "accelerator": "cpu", "devices": 1}
    try:
        made = LightningCLI(
            LightningModule,
            LightningDataModule if has_data else None,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=False,
            auto_configure_optimizers=False,
            parser_kwargs={"exit_on_error": False},
            run=False,
            args=["--config", json.dumps(described), *overrides] if overrides else described,
        )
    except Exception as error:  # jsonargparse raises errors of several libraries
        raise ConfigurationError(f"{source}: {error}") from error
    if made.datamodule is None and not is_overridden("train_dataloader", made.model):
        raise ConfigurationError(
            f"{source} has no `data`, and {type(made.model).__name__} has no train_dataloader. Add one of them."
        )
    return Task(module=made.model, data=made.datamodule, trainer_options=options)


def count_params(module: LightningModule) -> int:
    """Return the number of elements of all parameters, also of those that ZeRO-3 has emptied."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _read(path: str) -> dict[str, Any]:
    try:
        found = get_loader("yaml")(Path(path).read_text())
    except Exception as error:  # of the file, or of the YAML library
        raise ConfigurationError(f"--config {path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict) or "model" not in found:
        raise ConfigurationError(
            f"--config {path} has no `model`. Give a configuration of LightningCLI with `model` and `data`, such as "
            "`paral fit --print_config` prints."
        )
    return found
