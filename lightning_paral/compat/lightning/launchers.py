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

from lightning_paral.compat.private_name import Names

__all__ = [
    "LightningSubprocessLauncher",
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "TunerExit",
    "call_and_handle_interrupt",
]

NAMES: Names = {
    "lightning.pytorch.strategies.launchers": {
        "_SubprocessScriptLauncher(cluster_environment, num_processes, num_nodes)": "check before processes start",
        "_MultiProcessingLauncher(strategy, start_method)": "start ranks in notebooks, and copy weights and metrics back",
    },
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": {
        "_call_children_scripts": "take the processes over before Lightning's observer knows them",
    },
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher": {
        "_wrapping_function(process_idx, trainer, function, args, kwargs, return_queue)": "run a function in a rank",
        "_recover_results_in_main_process(worker_output, trainer)": "copy weights and metrics of rank 0 back",
    },
    "lightning.pytorch.strategies.launchers.multiprocessing._GlobalStateSnapshot": {
        "capture": "give spawned ranks the states of the random generators",
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
