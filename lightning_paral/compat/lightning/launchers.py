"""Lightning's launchers, which run the user's script again or start processes of `multiprocessing`."""

import multiprocessing
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer.call import _call_and_handle_interrupt as call_and_handle_interrupt
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit
from torch.multiprocessing.spawn import start_processes

from lightning_paral.compat.private_name import PrivateName

__all__ = [
    "LightningSubprocessLauncher",
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "TunerExit",
    "call_and_handle_interrupt",
]

_SEEN = "lightning 2.6.1 to 2.6.6"
_LAUNCHERS = "lightning.pytorch.strategies.launchers"
_WHY_PROCESSES = "Lightning's launcher waits for ever for a rank that ended without a result, and shows the first end"

NAMES = (
    PrivateName(
        name=f"{_LAUNCHERS}._SubprocessScriptLauncher",
        parameters=("cluster_environment", "num_processes", "num_nodes"),
        purpose="to check ports and options before processes start, and to leave no process behind",
        reason="Lightning has no public launcher class to extend",
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_LAUNCHERS}._SubprocessScriptLauncher._call_children_scripts",
        parameters=("self",),
        purpose="to take the processes over before Lightning's observer knows them",
        reason="the observer kills this process up to five seconds after another one failed, before it can say why",
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_LAUNCHERS}._MultiProcessingLauncher",
        parameters=("strategy", "start_method"),
        purpose="to start ranks in notebooks, and to copy weights and metrics back",
        reason="Lightning has no public launcher class to extend",
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_LAUNCHERS}._MultiProcessingLauncher._wrapping_function",
        parameters=("process_idx", "trainer", "function", "args", "kwargs", "return_queue", "global_states"),
        purpose="to run a function in a rank and send back what it leaves",
        reason=_WHY_PROCESSES,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_LAUNCHERS}._MultiProcessingLauncher._recover_results_in_main_process",
        parameters=("self", "worker_output", "trainer"),
        purpose="to copy weights and metrics of rank 0 back",
        reason=_WHY_PROCESSES,
        seen=_SEEN,
    ),
    PrivateName(
        name=f"{_LAUNCHERS}.multiprocessing._GlobalStateSnapshot.capture",
        parameters=(),
        purpose="to give spawned ranks the states of the random generators",
        reason=_WHY_PROCESSES,
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.trainer.call._call_and_handle_interrupt",
        parameters=("trainer", "trainer_fn"),
        purpose="to call the hooks for exceptions and to tear down in forked and spawned ranks as in a script",
        reason="Lightning's own launcher of such ranks does this only in the process that starts them",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.utilities.exceptions._TunerExitException",
        purpose="to tell the end of a search for a learning rate or a batch size from a failure",
        reason="the callbacks of Lightning that search raise it to end a run",
        seen=_SEEN,
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


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of processes, in parts."""

    def __init__(self, strategy: Any, method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, method)
        self.strategy, self.method = strategy, method

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trainer: Trainer
    ) -> tuple[Any, Any]:
        """Call `function` in a process for each local rank.

        Returns:
            tuple: the `ProcessContext`, and a queue for the output of local rank 0.
        """
        queue = multiprocessing.get_context(self.method).SimpleQueue()
        states = None if self.method == "fork" else _GlobalStateSnapshot.capture()
        ranks: Any = start_processes(  # type: ignore[no-untyped-call]
            self._wrapping_function,
            args=(trainer, function, args, kwargs, queue, states),
            nprocs=self.strategy.num_processes,
            join=False,
            start_method=self.method,
        )
        self.procs = ranks.processes
        return ranks, queue

    def restore(self, output: Any, trainer: Trainer) -> None:
        """Give the Trainer and its module the weights and metrics in the output of local rank 0."""
        self._recover_results_in_main_process(output, trainer)
