"""Lightning's launcher that runs the user's script again for every other local rank, and what it does on an error."""

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt as call_and_handle_interrupt

from lightning_paral.compat.private_name import PrivateName

__all__ = ["SubprocessScriptLauncher", "call_and_handle_interrupt"]

NAMES = (
    PrivateName(
        name="lightning.pytorch.strategies.launchers._SubprocessScriptLauncher",
        parameters=("cluster_environment", "num_processes", "num_nodes"),
        purpose="to check ports and options before processes start, and to leave no process behind",
        reason="Lightning has no public launcher class to extend",
        seen="lightning 2.6.1 to 2.6.6",
    ),
    PrivateName(
        name="lightning.pytorch.trainer.call._call_and_handle_interrupt",
        parameters=("trainer", "trainer_fn"),
        purpose="to call the hooks for exceptions and to tear down in forked and spawned ranks as in a script",
        reason="Lightning's own launcher of such ranks does this only in the process that starts them",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)
