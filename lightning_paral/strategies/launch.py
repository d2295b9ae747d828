"""Choose how the other local ranks are started, and check a strategy when its Trainer is created."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_paral.compat.lightning.strategies import LightningSubprocessLauncher
from lightning_paral.compat.private_name import check_names
from lightning_paral.distributed.launcher import ScriptLauncher
from lightning_paral.distributed.process_group import backend_for, check_device
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.user_hooks import trainer_of
from lightning_paral.strategies.process_launcher import ProcessLauncher

_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE")
"""Environment variables with the number of processes that mpirun, mpiexec, srun or jsrun started."""
_TEST_RUNNERS = ("pytest", "py.test", "_jb_pytest_runner.py")


class CheckedLaunch:
    """The part of a strategy that reports mistakes before other processes are started, and chooses their launcher.

    Args:
        strategy: the strategy, a `ParalStrategy`, for all of its runs.
    """

    _replaced: tuple[object, bool] | None = None
    """Lightning's launcher, which `_own_launcher` replaces, and whether that forks."""
    _own_launcher: ScriptLauncher | ProcessLauncher | None = None

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def check_environment(self) -> None:
        """Check what a launcher has set for this process. Under torchrun, take the number of nodes from it.

        Raises:
            ConfigurationError: a launcher started several processes, each of which would train alone.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
        """
        check_names("torch", "lightning")
        environment = self._strategy.cluster_environment
        if type(environment) is LightningEnvironment and not environment.creates_processes_externally:
            _check_alone()
        if isinstance(environment, TorchElasticEnvironment):
            self._strategy.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", self._strategy.num_nodes))

    def check_world_size(self) -> None:
        """Raise a `ConfigurationError` if the ranks, which have been set, are not as many as the Trainer expects."""
        environment, strategy = self._strategy.cluster_environment, self._strategy
        if environment is None or type(environment).validate_settings is not ClusterEnvironment.validate_settings:
            return  # Lightning compares them before it launches
        if environment.world_size() != strategy.num_processes * strategy.num_nodes:
            raise ConfigurationError(
                f"{type(environment).__name__} has {environment.world_size()} processes, but Trainer(devices="
                f"{strategy.num_processes}, num_nodes={strategy.num_nodes}) needs as many as devices on all nodes."
            )

    def check_settings(self) -> None:
        """Raise a `ConfigurationError` if no strategy supports the Trainer's settings."""
        strategy = self._strategy
        if strategy.local_rank >= strategy.num_processes:
            raise ConfigurationError(
                f"This process was started as local rank {strategy.local_rank}, but Trainer(devices=...) gives this "
                f"node {strategy.num_processes} device(s). Start as many processes per node as devices, or set "
                f"devices={strategy.local_rank + 1} or more."
            )
        check_device(strategy.root_device)
        backend_for(strategy.root_device, strategy.process_group_backend)
        if strategy._default_form == "sharded" and type(strategy.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigurationError(
                f"{type(strategy.checkpoint_io).__name__} saves the state of one rank, and under "
                f"{type(strategy).__name__} no rank has the full state. Remove it from the Trainer's plugins. To save "
                "in the background, use CheckpointOptions(async_save=True)."
            )

    def launcher(self, theirs: Any) -> Any:
        """Return our version of Lightning's launcher of the other processes; `theirs` if it is of another kind."""
        strategy, forks = self._strategy, self._forks
        environment = strategy.cluster_environment
        is_missing = theirs is None and environment is not None and environment.creates_processes_externally
        if not forks and type(theirs) is not LightningSubprocessLauncher and not is_missing:
            return theirs
        if self._replaced != (theirs, forks):
            self._replaced = theirs, forks
            watch = partial(getattr, strategy, "watch")
            self._own_launcher = (
                ProcessLauncher(strategy)
                if forks
                else ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes, watch)
            )
        return self._own_launcher

    def leaves_save_to_ranks(self, launcher: Any, checkpoint: dict[str, Any], filepath: Any) -> bool:
        """Return whether ranks that this process has started, and that have the state of the run, have saved it.

        Raises:
            ConfigurationError: `checkpoint` contains the state of optimizers that were in forked ranks.
        """
        trainer = trainer_of(self._strategy.lightning_module)
        if not isinstance(launcher, ProcessLauncher):
            return False
        if trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED:
            return True
        if launcher.has_fit and "optimizer_states" in checkpoint:
            raise ConfigurationError(
                f"{filepath} was not saved: the ranks of the last fit have ended, and the state of their optimizers "
                "with them. Save during the fit, for example with ModelCheckpoint(save_last=True), or save the weights "
                "only: trainer.save_checkpoint(path, weights_only=True)."
            )
        return False

    @property
    def _forks(self) -> bool:
        """Whether this process forks the other local ranks, because its program cannot be run again for each."""
        environment = self._strategy.cluster_environment
        if environment is None or environment.creates_processes_externally or self._strategy.num_processes == 1:
            return False
        main = sys.modules.get("__main__")
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if hasattr(sys, "ps1") or sys.flags.interactive:
            return True
        is_pytest = (spec is not None and spec.name.startswith("pytest.")) or Path(file or "").name in _TEST_RUNNERS
        return is_pytest or (spec is None and file in (None, "", "<stdin>"))  # `python -c`, or from standard input


def _check_alone() -> None:
    """Raise a `ConfigurationError` if a launcher started several processes, which Lightning takes for one each."""
    for variable in (*_SIZES, *["WORLD_SIZE"] * ("RANK" in os.environ)):
        size = os.environ.get(variable, "1")
        if size.isdecimal() and int(size) > 1:
            raise ConfigurationError(
                f"A launcher started {size} processes ({variable}={size}), but Lightning does not recognize it, so "
                "each process would train alone. Start them with torchrun, or pass Trainer(plugins=[...]) an "
                "environment: MPIEnvironment(), which needs mpi4py, LSFEnvironment(), KubeflowEnvironment(), or "
                "SLURMEnvironment(), which is the default unless SLURM_JOB_NAME is bash or interactive."
            )
