"""Lightning's subprocess launcher, which also checks the port and leaves no process behind after a failure."""

import atexit
import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.launchers import SubprocessScriptLauncher
from lightning_paral.distributed.launch_checks import check_port_is_free

_GRACE_SECONDS = 10.0  # time for the other ranks to report their errors
log = logging.getLogger(__name__)


class CheckedSubprocessLauncher(SubprocessScriptLauncher):
    """Starts a process for every other local rank by running the user's script again.

    Args:
        cluster_environment, num_processes, num_nodes: as in Lightning's launcher.
        check: a function called with the Trainer before any process is started. It raises an error if the run would
            fail in every process.
    """

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether the launcher works in a notebook: it does if it starts no process."""
        return self.num_processes == 1 or self.cluster_environment.creates_processes_externally

    _children: "Sequence[subprocess.Popen[Any]]" = ()
    """Processes of a failed run, which are ended when this process exits."""

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        check: Callable[[Trainer], None] | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check = check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other local ranks, then call `function` in this one.

        Raises:
            ConfigurationError: MASTER_PORT is in use on the node of rank 0, or options do not fit the module.
        """
        environment = self.cluster_environment
        if not environment.creates_processes_externally and environment.node_rank() == 0:
            check_port_is_free(environment)
            if trainer is not None and self._check is not None:
                self._check(trainer)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            # Lightning's observer would kill this process as soon as another one fails. But this process still has to
            # report its error, and may save a checkpoint together with the others. If the script catches the error, the
            # ranks may even continue. So hide the others from the observer, and end them when this process exits.
            if self.procs:
                self._children, self.procs[:] = list(self.procs), []
                atexit.register(self._end_children)
            raise

    def kill(self, signum: Any) -> None:
        """Send the signal `signum` to the processes that this launcher started."""
        for process in (*self.procs, *self._children):
            process.send_signal(signum)

    def _end_children(self) -> None:
        """Wait `_GRACE_SECONDS` for the processes of a failed run, then terminate them, and kill those that remain."""
        deadline = time.monotonic() + _GRACE_SECONDS
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._children:
                if end is not None and process.poll() is None:
                    log.info("Ending process %d, which outlived the failure of local rank 0.", process.pid)
                    end(process)
            for process in self._children:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
            deadline = time.monotonic() + 1.0
