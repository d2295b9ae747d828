"""`paral fit | validate | test | predict`: LightningCLI for any model, with the strategies of this package."""

import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from lightning_paral.cli.parser import BriefParser
from lightning_paral.cli.resume import checkpoint_or_callback
from lightning_paral.compat.lightning.command_line import CheckpointChoiceCLI
from lightning_paral.error_report import unwrap_parser_error
from lightning_paral.errors import ConfigurationError

TRAINER_COMMANDS = tuple(LightningCLI.subcommands())


class StrategyFirstTrainer(Trainer):
    """Lightning's Trainer; on the command line, `strategy` is parsed as a class if possible, otherwise as a name."""

    # jsonargparse tries the members of a union in order. With Lightning's annotation, `str | Strategy`, it would parse
    # every `--trainer.strategy package.Class` as a name.
    def __init__(self, *args: Any, strategy: Strategy | str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, strategy=strategy, **kwargs)


class AnyModelCLI(CheckpointChoiceCLI):
    """LightningCLI for any model, which also resumes from checkpoints that were saved without LightningCLI."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option `--resume`."""
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="continue from the newest sound checkpoint in a folder: `auto` for that of ModelCheckpoint, or a path",
        )

    def takes_hyper_parameters(self, path: str) -> bool:
        """Return whether the hyper-parameters in the checkpoint at `path` name a class, or if the path is not a file.

        A checkpoint that was saved without LightningCLI names no class, and Lightning's parser would fail on it. In
        this case, the model is built from the configuration alone.
        """
        if not Path(path).is_file():
            return True
        try:
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError):
            return False  # the strategy accepts more types, or reports the problem
        return "_class_path" in checkpoint.get("hyper_parameters", {})

    def instantiate_classes(self) -> None:
        """Create the objects that the configuration describes.

        Raises:
            ConfigurationError: an option of a strategy is wrong. The parser's own error would list all possible types.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise unwrap_parser_error(error) or error from None
        self._resume()

    def _resume(self) -> None:
        """Apply the option `--resume`.

        Raises:
            ConfigurationError: it does not fit the command, the other options, or the callbacks of the Trainer.
        """
        options = self.config_init[self.subcommand]
        resume = options.get("resume")
        if resume is None:
            return
        if self.subcommand != "fit" or options.get("ckpt_path"):
            raise ConfigurationError(
                f"--resume {resume} is an option of `paral fit` without --ckpt_path. Leave one of them out."
                if self.subcommand == "fit"
                else f"--resume {resume} continues a fit, but the command is {self.subcommand}. Use --ckpt_path."
            )
        callbacks = vars(self.trainer)["callbacks"]
        found = checkpoint_or_callback(resume, callbacks)
        if isinstance(found, str):
            options["ckpt_path"] = found
        else:
            callbacks.insert(0, found)


def import_from_current_folder() -> None:
    """Let `class_path` name modules in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def run_trainer_command() -> None:
    """Run LightningCLI with the arguments of the process."""
    import_from_current_folder()
    AnyModelCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_class=StrategyFirstTrainer,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        parser_class=BriefParser,
    )


class ConfiguredCLI(AnyModelCLI):
    """Creates the objects that the arguments of `paral fit` describe, but no Trainer, and trains nothing."""

    def __init__(self, arguments: list[str]) -> None:
        self.trainer_options: dict[str, Any] = {}
        """The options of the Trainer, with their objects."""
        import_from_current_folder()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # another command reads the command line
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                trainer_class=StrategyFirstTrainer,
                save_config_callback=None,
                auto_configure_optimizers=False,
                parser_class=BriefParser,
                args=["fit", *arguments],
            )

    @property
    def seed(self) -> int:
        """The seed of the configuration; 0 if it has none."""
        seed = self.config[self.subcommand].get("seed_everything")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0

    def _resume(self) -> None:
        """Do nothing, because nothing is trained."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Keep the options, and return an object that does nothing."""
        self.trainer_options = self.config_init[self.subcommand].trainer.as_dict()
        return _NoTrainer()


class _NoTrainer:
    """Takes the place of the Trainer that LightningCLI calls."""

    def fit(self, *_: Any, **__: Any) -> None:
        """Do nothing."""
