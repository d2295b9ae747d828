"""Lightning's launcher that starts the other local ranks by running the user's script again."""

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher

from lightning_paral.compat.private_name import PrivateName

__all__ = ["SubprocessScriptLauncher"]

NAMES = (
    PrivateName(
        name="lightning.pytorch.strategies.launchers._SubprocessScriptLauncher",
        parameters=("cluster_environment", "num_processes", "num_nodes"),
        purpose="to check ports and options before processes start, and to leave no process behind",
        reason="Lightning has no public launcher to extend",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)
