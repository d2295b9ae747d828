"""Lightning's subprocess launcher, with the port checked before any process starts and none left behind on failure."""

import atexit
import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_paral.process_group import check_port_is_free

_GRACE_SECONDS = 10.0  # for the other ranks to report what they failed of
log = logging.getLogger(__name__)


class CheckedSubprocessLauncher(_SubprocessScriptLauncher):
    """Starts one process per further local rank by running the user's script again."""

    _children: "Sequence[subprocess.Popen[Any]]" = ()
    """Those of a run that failed in this process."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other local ranks, then call `function` in this one.

        Raises:
            ConfigurationError: rank 0 is to be on this host and MASTER_PORT is taken.
        """
        environment = self.cluster_environment
        if not environment.creates_processes_externally and environment.node_rank() == 0:
            check_port_is_free(environment)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            # Lightning's observer kills this process as soon as it sees one of the others fail; but it has an error to
            # tell, and perhaps a checkpoint to save together with the others.
            self._children, self.procs[:] = list(self.procs), []
            atexit.register(self.end_children)
            raise

    def kill(self, signum: Any) -> None:
        """Send a signal to the processes this launcher started."""
        for process in (*self.procs, *self._children):
            process.send_signal(signum)

    def end_children(self) -> None:
        """After a failure, wait a little for the processes this launcher started, then end those that are left."""
        atexit.unregister(self.end_children)
        children, self._children = self._children, []
        deadline = time.monotonic() + _GRACE_SECONDS
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in children:
                if end is not None and process.poll() is None:
                    log.info("Ending process %d, which outlived the failure of local rank 0.", process.pid)
                    end(process)
            for process in children:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
            deadline = time.monotonic() + 1.0
