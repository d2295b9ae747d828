"""Lightning's launcher that runs the user's script again for every other local rank."""

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher

from lightning_paral.compat.private_name import PrivateName

__all__ = ["SubprocessScriptLauncher"]

NAMES = (
    PrivateName(
        name="lightning.pytorch.strategies.launchers._SubprocessScriptLauncher",
        parameters=("cluster_environment", "num_processes", "num_nodes"),
        purpose="to check ports and options before processes start, and to leave no process behind",
        reason="Lightning has no public launcher class to extend",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)
