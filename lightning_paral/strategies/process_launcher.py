"""Launch the ranks in forked processes: in notebooks, interactive sessions, `python -c` and pytest."""

import gc
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from lightning_paral.compat.lightning.strategies import call_and_handle_interrupt
from lightning_paral.compat.torch.dtensor import forget_meshes
from lightning_paral.distributed.launcher import describe_status, end_with_parent
from lightning_paral.distributed.process_group import (
    check_port_is_free,
    owned_group,
    release_at_exit,
    release_process_group,
)
from lightning_paral.errors import ConfigurationError, RankFailedError
from lightning_paral.model.engine_attributes import is_left_partitioned

_GRACE_SECONDS = 10.0
"""How long the other ranks may take to end, and to save, after one has ended with an error."""
_CONSEQUENCE = f"{RankFailedError.__module__}.{RankFailedError.__name__}: "


class ProcessLauncher:
    """Forks a process for every local rank; weights and metrics of rank 0 come back.

    Lightning's launcher does the same, but without our hooks for exceptions in the ranks, and it waits forever for a
    rank that returns more than a pipe takes. The process that starts the ranks never joins their process group, and
    never initializes CUDA. So further runs can follow in it.

    Args:
        strategy: the strategy of the run.
    """

    is_interactive_compatible = True
    """Lightning asks for it in notebooks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.procs: list[Any] = []
        """The processes of the last run."""
        self.has_fit = False
        """Whether ranks, which have ended together with their optimizers, have fitted the module."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call `function` in all local ranks, and return what local rank 0 returned.

        Raises:
            ConfigurationError: CUDA is initialized, MASTER_PORT is in use, or the Trainer has fitted before.
            ProcessRaisedException: a rank raised an error, whose traceback is in the message.
            RankFailedError: a process died without an error.
        """
        assert trainer is not None
        strategy, environment = self._strategy, self._strategy.cluster_environment
        is_fit = trainer.state.fn == TrainerFn.FITTING
        environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)
        self._prepare(is_fit)
        with TemporaryDirectory() as folder:
            file = Path(folder, "left_by_rank_0")
            try:
                self._run(trainer, partial(function, *args, **kwargs), file)
            finally:
                strategy.lightning_module.trainer = trainer  # Lightning's teardown needs it after an error
            if not file.exists():
                raise RankFailedError("The ranks ended without a result: rank 0 called sys.exit or os._exit.")
            result, weights, metrics, best_path, trainer.state = torch.load(file, weights_only=False)
        if is_fit:
            self.has_fit, module = True, strategy.lightning_module
            if is_overridden("configure_model", module):
                module.configure_model()  # adds the layers that it has added in the ranks
            module.load_state_dict(weights, strict=module.strict_loading)
        trainer.callback_metrics.update(metrics)
        if best_path is not None:
            vars(trainer.checkpoint_callback)["best_model_path"] = best_path
        return result

    def kill(self, signum: int) -> None:
        """Send a signal to the ranks that live."""
        for process in self.procs:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def _prepare(self, is_fit: bool) -> None:
        """Release a process group of an earlier run, and check that processes can be started."""
        environment = self._strategy.cluster_environment
        if self._strategy.root_device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigurationError(
                "CUDA was initialized in this process before the run, so forked ranks cannot use it. Restart the "
                "kernel, and call nothing of torch.cuda but device_count and is_available before the first run. "
                "Otherwise, put the code into a script, or set devices=1."
            )
        if is_fit and self.has_fit:
            raise ConfigurationError(
                "This Trainer has fitted in ranks that have ended, and its counters of steps and epochs with them. To "
                "fit again, create a new Trainer; to continue, pass fit(ckpt_path=...) with a checkpoint of the fit."
            )
        if owned_group() is not None:
            release_process_group()  # of one rank: a forked process could neither use nor destroy it
        forget_meshes()  # their process groups: a forked process that destroys one waits for threads that it lacks
        gc.collect()
        if environment.node_rank() == 0:
            check_port_is_free(environment)  # which chooses the port, for all ranks

    def _run(self, trainer: Trainer, function: Callable[[], Any], file: Path) -> None:
        """Call `function` in all local ranks. What local rank 0 leaves is written to `file`."""
        num_ranks, given = self._strategy.num_processes, (trainer, function, file)
        ranks: Any = start_processes(_run_in_rank, given, num_ranks, join=False, start_method="fork")  # type: ignore[no-untyped-call]
        self.procs = ranks.processes
        try:
            while not ranks.join(grace_period=_GRACE_SECONDS):
                pass
        except KeyboardInterrupt:
            self.kill(signal.SIGINT)
            for each in self.procs:
                each.join(timeout=_GRACE_SECONDS)
            raise
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise self._first_cause(ranks, error.error_index) from None
        finally:
            for each in self.procs:
                each.kill()
                each.join()

    def _first_cause(self, ranks: ProcessContext, noticed: int) -> BaseException:
        """Return the error to raise after ranks have ended, of which `noticed` is the one that was noticed first."""
        files = {number: Path(file) for number, file in enumerate(ranks.error_files) if os.path.exists(file)}
        traces = {number: pickle.loads(file.read_bytes()) for number, file in files.items()}
        statuses = {process.exitcode for process in ranks.processes}
        if not traces and len(statuses) == 1 and (status := statuses.pop() or 0) > 0:
            return SystemExit(status)  # all ranks have agreed on it, as after a preemption
        causes = [number for number, trace in traces.items() if _CONSEQUENCE not in trace]
        number = (causes or [noticed])[0]
        process = ranks.processes[number]
        rank = self._strategy.cluster_environment.node_rank() * self._strategy.num_processes + number
        if number in traces:
            return ProcessRaisedException(f"Rank {rank} raised an error:\n\n{traces[number]}", number, process.pid)
        return RankFailedError(f"Rank {rank} died without an error: {describe_status(process.exitcode)}.")


def _run_in_rank(local_rank: int, trainer: Trainer, function: Callable[[], Any], file: Path) -> None:
    """Call `function` in the process of a rank. Local rank 0 writes what is to come back to `file`.

    Raises:
        ConfigurationError: parameters stayed sharded.
    """
    end_with_parent()
    strategy: Any = trainer.strategy
    # OpenMP would wait for threads that exist only in the parent: https://github.com/pytorch/pytorch/issues/17199
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(local_rank)}
    strategy.set_world_ranks()
    result = call_and_handle_interrupt(trainer, function)
    module, is_fit = strategy.lightning_module, trainer.state.fn == TrainerFn.FITTING
    for name, parameter in module.named_parameters():
        if is_fit and (isinstance(parameter, DTensor) or is_left_partitioned(parameter)):
            raise ConfigurationError(
                f"The parameter {name} stayed sharded after the fit, for the reason in the warning above, so the "
                "weights cannot be sent to the process that started the ranks. Load them from a checkpoint of the run."
            )
    with suppress(RuntimeError):
        release_at_exit()  # forked processes do not call functions of `atexit`
    if local_rank == 0:
        weights = dict(module.state_dict()) if is_fit else {}
        left = move_data_to_device((result, weights, trainer.callback_metrics), "cpu")
        torch.save((*left, getattr(trainer.checkpoint_callback, "best_model_path", None), trainer.state), file)
