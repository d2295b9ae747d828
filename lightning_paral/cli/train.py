"""`paral fit | validate | test | predict`: LightningCLI for any model, with the strategies of this package."""

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.checkpoint.load import is_checkpoint
from lightning_paral.cli.parser import TrainerParser
from lightning_paral.errors import ConfigurationError, MissingCheckpointError, ParalError
from lightning_paral.registry import STRATEGIES, explain_unknown_name


class StrategyFirstTrainer(Trainer):
    """Lightning's Trainer; on the command line, `strategy` is parsed as a class if possible, otherwise as a name."""

    # jsonargparse tries the members of a union in order. With Lightning's annotation, `str | Strategy`, it would parse
    # every `--trainer.strategy package.Class` as a name.
    def __init__(self, *args: Any, strategy: Strategy | str = "auto", **kwargs: Any) -> None:
        if isinstance(strategy, str) and strategy.startswith("paral") and strategy not in StrategyRegistry:
            raise ConfigurationError(explain_unknown_name(strategy))
        super().__init__(*args, strategy=strategy, **kwargs)


class AnyModelCLI(LightningCLI):
    """LightningCLI for any model; a checkpoint may come from any program.

    Modules in the current folder can be named in a `class_path`.
    """

    def __init__(self, **options: Any) -> None:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        for entry in STRATEGIES:  # jsonargparse finds a class by its name alone if it is imported
            _ = entry.strategy
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=StrategyFirstTrainer,
            auto_configure_optimizers=False,
            parser_class=TrainerParser,
            parser_kwargs={"prog": "paral"},
            **options,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option `--resume`."""
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="continue from the newest sound checkpoint in a folder: `auto` for that of ModelCheckpoint, or a path",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and set the checkpoint aside: the model is what the configuration says.

        LightningCLI would replace it by the hyper-parameters in the checkpoint, and fail on those of other programs.
        """
        super().parse_arguments(parser, args)
        self._checkpoint = self.config[self.config.subcommand].pop("ckpt_path", None)

    def instantiate_classes(self) -> None:
        """Create the objects that the configuration describes.

        Raises:
            ConfigurationError: an option of a strategy is wrong. The parser's own error would list all possible types.
        """
        self.config[self.subcommand]["ckpt_path"] = self._checkpoint
        try:
            super().instantiate_classes()
        except ValueError as error:
            inner: BaseException | None = error
            while inner is not None and not isinstance(inner, ParalError):
                inner = inner.__cause__ or inner.__context__
            raise inner or error from None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Create the Trainer, and apply the option `--resume`.

        Raises:
            ConfigurationError: `--resume` does not fit the command, the other options, or the callbacks.
        """
        trainer = super().instantiate_trainer(**kwargs)
        options = self.config_init[self.subcommand]
        resume = options.get("resume")
        if resume is None:
            return trainer
        if self.subcommand != "fit" or options.get("ckpt_path"):
            raise ConfigurationError(f"--resume {resume} is for `paral fit` without --ckpt_path. Leave one out.")
        if "://" in resume or is_checkpoint(Path(resume)):
            if "://" not in resume and not Path(resume).exists():
                raise MissingCheckpointError(f"--resume {resume}: there is no checkpoint at this path.")
            options["ckpt_path"] = resume
        else:
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) if resume == "auto" else resume
            if not folder:
                raise ConfigurationError(
                    "--resume auto takes the folder of ModelCheckpoint, which has none. Give it a dirpath, as in "
                    "ModelCheckpoint(dirpath='checkpoints'). Without it, each start of a run saves to another folder."
                )
            vars(trainer)["callbacks"].insert(0, AutoResume(folder))
        return trainer


class ConfiguredCLI(AnyModelCLI):
    """Creates the objects that the arguments of `paral fit` describe, but no Trainer, and trains nothing."""

    def __init__(self, arguments: list[str]) -> None:
        self.trainer_options: dict[str, Any] = {}
        """The options of the Trainer, with their objects."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # another command reads the command line
            super().__init__(save_config_callback=None, args=["fit", *arguments])

    @property
    def seed(self) -> int:
        """The seed of the configuration; 0 if it has none."""
        seed = self.config[self.subcommand].get("seed_everything")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Keep the options, and return an object that does nothing."""
        self.trainer_options = self.config_init[self.subcommand].trainer.as_dict()
        return SimpleNamespace(fit=lambda **_: None)
