"""Lightning's subprocess launcher, with the port checked before any process starts and none left behind on failure."""

import logging
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_paral.model.before_launch import check_before_launch
from lightning_paral.process_group import check_port_is_free

_GRACE_SECONDS = 10.0  # for the other ranks to report what they failed of
log = logging.getLogger(__name__)


class CheckedSubprocessLauncher(_SubprocessScriptLauncher):
    """Starts one process per further local rank by running the user's script again."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other local ranks, then call `function` in this one.

        Raises:
            ConfigurationError: rank 0 is to be on this host and MASTER_PORT is taken, or options do not fit the module.
        """
        environment = self.cluster_environment
        if not environment.creates_processes_externally and environment.node_rank() == 0:
            check_port_is_free(environment)
            if trainer is not None and trainer.lightning_module is not None:
                check_before_launch(trainer.strategy, trainer)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            self._end_children()
            raise

    def _end_children(self) -> None:
        """Wait a little for the processes this launcher started, then end those that are left."""
        # Lightning's observer looks at the list itself, and kills this process at once where a child in it has failed:
        # the error of this one would be lost.
        processes, self.procs[:] = list(self.procs), []
        deadline = time.monotonic() + _GRACE_SECONDS
        for end in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in processes:
                if end is not None and process.poll() is None:
                    log.info("Ending process %d, which outlived the failure of local rank 0.", process.pid)
                    end(process)
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
            deadline = time.monotonic() + 1.0
