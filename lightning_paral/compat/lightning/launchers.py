"""Lightning's launcher that runs the user's script again for every other local rank, and what it does on an error."""

from collections.abc import Callable

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt as call_and_handle_interrupt
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit

from lightning_paral.compat.private_name import Names

__all__ = ["LightningSubprocessLauncher", "SubprocessScriptLauncher", "TunerExit", "call_and_handle_interrupt"]

NAMES: Names = {
    "lightning.pytorch.strategies.launchers": {
        "_SubprocessScriptLauncher(cluster_environment, num_processes, num_nodes)": "check before processes start",
    },
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": {
        "_call_children_scripts": "take the processes over before Lightning's observer knows them",
    },
    "lightning.pytorch.trainer.call": {
        "_call_and_handle_interrupt(trainer, trainer_fn)": "call the hooks for exceptions in forked ranks",
    },
    "lightning.pytorch.utilities.exceptions": {
        "_TunerExitException": "tell the end of a search for a learning rate or a batch size from a failure",
    },
}

LightningSubprocessLauncher = _SubprocessScriptLauncher
"""Lightning's class, which Lightning's strategies use."""


class SubprocessScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a method that a subclass can override to take over the processes."""

    def start_others(self, start: Callable[[], None]) -> None:
        """Start the other local ranks by calling `start`, which adds them to `procs`.

        Lightning then observes the processes in `procs`, and kills all if one fails.
        """
        start()

    def _call_children_scripts(self) -> None:
        self.start_others(super()._call_children_scripts)
