"""Launch the ranks in forked or spawned processes: in notebooks, interactive sessions, `python -c` and pytest."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.compat.lightning.launchers import call_and_handle_interrupt
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.distributed.launching.forked_threads import can_use_threads_after_fork, check_backward_after_fork
from lightning_paral.distributed.launching.launch_checks import check_port_is_free
from lightning_paral.distributed.launching.rank_main import noting_failure
from lightning_paral.distributed.launching.rank_processes import RankProcesses, check_main_guard, run_ranks
from lightning_paral.distributed.launching.start_method import prepare_to_start
from lightning_paral.distributed.process_group import release_at_exit
from lightning_paral.distributed.rng_state import GlobalStates, global_states, set_global_states
from lightning_paral.strategies.rank_zero_state import RankZeroState, restore

Settings = tuple[GlobalStates, bool, bool, bool, str]
"""States of the random generators; deterministic algorithms, whether only to warn; cuDNN's benchmark; precision."""


class ProcessLauncher:
    """Starts a process of `multiprocessing` for every local rank, and copies the state of rank 0 back after the run.

    The process that starts the ranks never joins their process group, and never initializes CUDA. So further runs can
    follow in it.

    Args:
        strategy: the strategy of the run.
        method: the start method of `multiprocessing`.
        check: a function called with the Trainer before any process is started. It raises an error if the run would
            fail in every process.
    """

    is_interactive_compatible = True
    _has_warned = False

    def __init__(
        self, strategy: Any, method: Literal["spawn", "fork", "forkserver"], check: Callable[[Trainer], None]
    ) -> None:
        self._strategy, self._method, self._check = strategy, method, check
        self._processes: RankProcesses | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        """Call `function` in all local ranks, and return what local rank 0 returned.

        Raises:
            BaseException: the error of the rank that failed first.
            ConfigurationError: processes cannot be started with the start method, MASTER_PORT is in use, or options do
                not fit the module.
            RankFailedError: a process died without an error.
        """
        check_main_guard()
        strategy, environment = self._strategy, self._strategy.cluster_environment
        prepare_to_start(self._method, strategy.root_device)
        environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)
        if environment.node_rank() == 0:
            check_port_is_free(environment)
            self._check(trainer)
        address = {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
        address |= {"NODE_RANK": str(environment.node_rank())}
        if self._method == "fork" and trainer.state.fn == TrainerFn.FITTING:
            check_backward_after_fork()
        one_thread = self._method == "fork" and not can_use_threads_after_fork()
        if one_thread and not self._has_warned:
            self._has_warned = True
            rank_zero_info(
                "This process has already computed with several threads, which forked ranks cannot use. Each rank "
                "computes with one thread. To avoid this, restart, and compute nothing before the run."
            )
        first = environment.node_rank() * strategy.num_processes
        folder = Path(tempfile.mkdtemp(prefix="lightning_paral-"))
        try:
            run_ranks(
                run_rank,
                (first, trainer, function, args, kwargs, folder, address, one_thread, _settings(self._method)),
                ranks=range(first, first + strategy.num_processes),
                method=self._method,
                on_start=self._set_processes,
            )
            result = restore(trainer, (*args, *kwargs.values()), folder)
        except BaseException:
            strategy.lightning_module.trainer = trainer  # the teardown that follows needs it
            strategy._undo_guard = ExitStack()
            for callback in vars(trainer)["callbacks"]:
                shadow_method(callback, "on_exception", _do_nothing, strategy._undo_guard)  # the ranks have called it
            raise
        finally:
            self._processes = None
            shutil.rmtree(folder, ignore_errors=True)
        if trainer.state.fn == TrainerFn.FITTING:
            strategy.has_fit_in_ranks = True
        return result

    def kill(self, signum: Any) -> None:
        """Send the signal `signum` to the ranks."""
        if self._processes is not None:
            self._processes.send(signum)

    def _set_processes(self, processes: RankProcesses) -> None:
        self._processes = processes

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the processes, which other processes cannot use."""
        return {**vars(self), "_processes": None}


def _do_nothing(trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
    pass


def _settings(method: str) -> Settings | None:
    """Return the settings that a forked process inherits, and that others have to be given."""
    if method == "fork":
        return None
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    return global_states(), deterministic, warn_only, benchmark, torch.get_float32_matmul_precision()


def run_rank(
    rank: int,
    first: int,
    trainer: Trainer,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    folder: Path,
    address: dict[str, str],
    one_thread: bool,
    settings: Settings | None,
) -> None:
    """Run `function` in the process of `rank`. The first local rank writes the state of the run to `folder`.

    Args:
        rank: the global rank.
        first: the global rank of local rank 0.
        trainer: the Trainer of the run.
        function: a method of the Trainer.
        args: its positional arguments.
        kwargs: its keyword arguments.
        folder: an empty folder.
        address: environment variables with the address of rank 0, and the number of the node.
        one_thread: whether to compute with one thread.
        settings: the settings of the process that started this one; `None` if they are inherited.
    """
    strategy: Any = trainer.strategy
    os.environ.update(address, LOCAL_RANK=str(rank - first))
    if one_thread:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    if settings is not None:
        states, deterministic, warn_only, benchmark, precision = settings
        set_global_states(states)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.set_flags(_benchmark=benchmark)  # type: ignore[no-untyped-call]
        torch.set_float32_matmul_precision(precision)
        _unshare(strategy.lightning_module)
    strategy.has_fit_in_ranks = False
    strategy.set_world_ranks()
    state = RankZeroState(trainer, (*args, *kwargs.values())) if rank == first else None

    def run(*args: Any, **kwargs: Any) -> Any:
        with noting_failure():
            return function(*args, **kwargs)

    result = call_and_handle_interrupt(trainer, run, *args, **kwargs)
    if state is not None:
        state.save(result, folder)
    with suppress(RuntimeError):
        release_at_exit()  # forked processes do not call functions of `atexit`


@torch.no_grad()
def _unshare(module: LightningModule) -> None:
    """Copy the module's tensors, which `multiprocessing` has sent in memory that all ranks share."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
