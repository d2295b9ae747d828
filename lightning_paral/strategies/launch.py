"""Choose how the other local ranks are started, and check a strategy when its Trainer is created."""

import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_paral.compat.checks import check_names
from lightning_paral.compat.lightning.launchers import LightningSubprocessLauncher
from lightning_paral.distributed.launch_checks import check_device, check_environment, check_local_rank, check_ranks
from lightning_paral.distributed.launcher import LaunchedRun, ScriptLauncher
from lightning_paral.distributed.process_group import backend_for
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.before_launch import check_before_launch
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.options import StartMethod
from lightning_paral.strategies.description import StrategyDescription
from lightning_paral.strategies.process_launcher import ProcessLauncher

_PYTEST = "a run of pytest"
_TEST_RUNNERS = ("pytest", "py.test", "_jb_pytest_runner.py")


class CheckedLaunch(StrategyDescription):
    """Mixin, placed before the Lightning base: report mistakes before other processes are started."""

    process_group_backend: str | None
    num_nodes: int
    num_processes: int
    _launchers: tuple[object, ScriptLauncher] | None = None
    """Lightning's launcher, and ours, which replaces it."""
    _process_launcher: ProcessLauncher | None = None
    _given_start_method: StartMethod | None = None

    def set_world_ranks(self) -> None:
        """Check the Trainer's settings, then set this process's rank in the environment and in Lightning's logging.

        The Trainer calls this in every process, at the end of its construction, before it starts other processes.
        Under torchrun, the number of nodes is that of torchrun: with `--nnodes 1:2` it may change at each restart.

        Raises:
            ConfigurationError: the Trainer's settings do not fit the strategy.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
        """
        check_names("torch", "lightning")
        if self.cluster_environment is not None:
            check_environment(self.cluster_environment)
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", self.num_nodes))
        self._check_configured()
        super().set_world_ranks()  # type: ignore[misc]
        if self.cluster_environment is not None:
            check_ranks(self.cluster_environment, self.num_processes, self.num_nodes)

    def _check_configured(self) -> None:
        """Raise a `ConfigurationError` if the strategy does not support the Trainer's settings."""
        check_local_rank(self.local_rank, self.num_processes)
        check_device(self.root_device)
        backend_for(self.root_device, self.process_group_backend)
        _ = self._start_method_now
        if self._default_form == "sharded" and type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigurationError(
                f"{type(self.checkpoint_io).__name__} saves the state of one rank, and under {type(self).__name__} no "
                "rank has the full state. Remove it from the Trainer's plugins. To save in the background, use "
                "CheckpointOptions(async_save=True)."
            )

    @property
    def launcher(self) -> Any:
        """Lightning's launcher of the other processes; if it runs the script again, our version, which checks first."""
        method = self._start_method_now
        if method != "popen":
            if self._process_launcher is None:
                self._process_launcher = ProcessLauncher(self, method, partial(check_before_launch, self))
            return self._process_launcher
        theirs, environment = super().launcher, self.cluster_environment
        is_missing = theirs is None and environment is not None and environment.creates_processes_externally
        if type(theirs) is not LightningSubprocessLauncher and not is_missing:
            return theirs
        if self._launchers is None or self._launchers[0] is not theirs:
            assert environment is not None
            check = partial(check_before_launch, self)
            ours = ScriptLauncher(environment, self.num_processes, self.num_nodes, check, run=cast(LaunchedRun, self))
            self._launchers = theirs, ours
        return self._launchers[1]

    @property
    def _start_method_now(self) -> StartMethod:
        """How this process starts the other local ranks; `"popen"` also if it starts none."""
        environment = self.cluster_environment
        if environment is None or environment.creates_processes_externally:
            return "popen"
        if self.num_processes == 1 and self._given_start_method is None:
            return "popen"
        return choose_start_method(self._given_start_method)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save `checkpoint`.

        Raises:
            ConfigurationError: it contains the state of optimizers that were in forked or spawned ranks.
        """
        trainer, launcher = trainer_of(self.lightning_module), self._process_launcher
        is_in_ranks = launcher is not None and self.launcher is launcher
        if is_in_ranks and trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED:
            return  # the ranks, which have the state of the run, have saved it
        if is_in_ranks and launcher is not None and launcher.has_fit and "optimizer_states" in checkpoint:
            raise ConfigurationError(
                f"{filepath} was not saved: the ranks of the last fit have ended, and the state of their optimizers "
                "with them. Save during the fit, for example with ModelCheckpoint(save_last=True), or save the weights "
                "only: trainer.save_checkpoint(path, weights_only=True)."
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)


def check_start_method(given: object) -> None:
    """Raise a `ConfigurationError` if `given` is neither a start method of this platform nor `None`."""
    available = multiprocessing.get_all_start_methods()
    if given not in (None, "popen") and given not in available:
        raise ConfigurationError(
            f"start_method={given!r} is not available on {sys.platform}. Choose from: "
            f"{', '.join(map(repr, ['popen', *available]))}."
        )


def choose_start_method(given: StartMethod | None) -> StartMethod:
    """Return `given`; if it is `None`, `"popen"` in a script, and `"fork"` in a program that cannot be run again.

    Raises:
        ConfigurationError: the program cannot be run again, and `given` is `"popen"` or the platform cannot fork. With
            `"popen"`, pytest runs again from its first test.
    """
    if given not in (None, "popen"):
        return given
    program = _why_script_cannot_run_again()
    if program is None or (given == "popen" and program == _PYTEST):
        return "popen"
    if given == "popen":
        raise ConfigurationError(
            f"start_method='popen' starts the other ranks by running the script again, but this is {program}. Leave "
            "start_method out to fork them, or put the code into a script."
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError(
            f"This is {program}, where ranks can be started only by forking, which {sys.platform} does not support. "
            "Put the code into a script and run it, or set Trainer(devices=1)."
        )
    return "fork"


def _why_script_cannot_run_again() -> str | None:
    """Return what this program is, such as `"an interactive session"`, if it cannot be run again; `None` if it can."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive session"
    if (spec is not None and spec.name.startswith("pytest.")) or Path(file or "").name in _TEST_RUNNERS:
        return _PYTEST
    if spec is None and file in (None, "", "<stdin>"):
        return "code from `python -c` or from standard input"
    return None
