"""How LightningCLI uses the checkpoint given as `--ckpt_path`."""

from typing import Any

from lightning.pytorch.cli import LightningCLI

from lightning_paral.compat.private_name import PrivateName

_PARSE = PrivateName(
    name="lightning.pytorch.cli.LightningCLI._parse_ckpt_path",
    parameters=("self",),
    purpose="to resume from checkpoints that were saved without a LightningCLI",
    reason="LightningCLI overrides the configured model with the checkpoint's hyper-parameters, and no option stops it",
    seen="lightning 2.6.1 to 2.6.6",
)
NAMES = (_PARSE,)


class CheckpointChoiceCLI(LightningCLI):
    """LightningCLI with a method that decides whether a checkpoint's hyper-parameters override the configured model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _PARSE.resolve()  # a renamed method would not be overridden
        super().__init__(*args, **kwargs)

    def takes_hyper_parameters(self, path: str) -> bool:
        """Return whether the hyper-parameters in the checkpoint at `path` override the configured model."""
        return True

    def _parse_ckpt_path(self) -> None:
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        if not path or self.takes_hyper_parameters(str(path)):
            super()._parse_ckpt_path()
