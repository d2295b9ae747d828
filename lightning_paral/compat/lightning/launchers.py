"""Lightning's launcher that runs the user's script again for every other local rank."""

from collections.abc import Callable

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="lightning.pytorch.strategies.launchers._SubprocessScriptLauncher",
        parameters=("cluster_environment", "num_processes", "num_nodes"),
        purpose="to check ports and options before processes start, and to leave no process behind",
        reason="Lightning has no public launcher class to extend",
        seen="lightning 2.6.1 to 2.6.6",
    ),
    PrivateName(
        name="lightning.pytorch.strategies.launchers._SubprocessScriptLauncher._call_children_scripts",
        parameters=("self",),
        purpose="to take the processes over before Lightning's observer knows them",
        reason="the observer kills this process up to five seconds after another one failed, before it can say why",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)

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
