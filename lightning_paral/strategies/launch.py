"""Check a strategy when its Trainer is created, and its module before other processes are started."""

import os
from functools import partial
from typing import Any, cast

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_paral.compat.checks import check_names
from lightning_paral.compat.lightning.launchers import LightningSubprocessLauncher
from lightning_paral.distributed.launch_checks import check_device, check_local_rank
from lightning_paral.distributed.launcher import CheckedSubprocessLauncher, LaunchedRun
from lightning_paral.distributed.process_group import backend_for
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.before_launch import check_before_launch
from lightning_paral.strategies.description import StrategyDescription


class CheckedLaunch(StrategyDescription):
    """Mixin, placed before the Lightning base: report mistakes before other processes are started."""

    process_group_backend: str | None
    num_nodes: int
    num_processes: int
    _launchers: tuple[object, CheckedSubprocessLauncher] | None = None
    """Lightning's launcher, and ours, which replaces it."""

    def set_world_ranks(self) -> None:
        """Check the Trainer's settings, then set this process's rank in the environment and in Lightning's logging.

        The Trainer calls this in every process, at the end of its construction, before it starts other processes.
        Under torchrun, the number of nodes is that of torchrun: with `--nnodes 1:2` it may change at each restart.

        Raises:
            ConfigurationError: the Trainer's settings do not fit the strategy.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
        """
        check_names("torch", "lightning")
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", self.num_nodes))
        self._check_configured()
        super().set_world_ranks()  # type: ignore[misc]

    def _check_configured(self) -> None:
        """Raise a `ConfigurationError` if the strategy does not support the Trainer's settings."""
        check_local_rank(self.local_rank, self.num_processes)
        check_device(self.root_device)
        backend_for(self.root_device, self.process_group_backend)
        if self._default_form == "sharded" and type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigurationError(
                f"{type(self.checkpoint_io).__name__} saves the state of one rank, and under {type(self).__name__} no "
                "rank has the full state. Remove it from the Trainer's plugins. To save in the background, use "
                "CheckpointOptions(async_save=True)."
            )

    @property
    def launcher(self) -> Any:
        """Lightning's launcher of the other processes; if it runs the script again, our version, which checks first."""
        theirs, environment = super().launcher, self.cluster_environment
        is_missing = theirs is None and environment is not None and environment.creates_processes_externally
        if type(theirs) is not LightningSubprocessLauncher and not is_missing:
            return theirs
        if self._launchers is None or self._launchers[0] is not theirs:
            assert environment is not None
            check = partial(check_before_launch, self)
            ours = CheckedSubprocessLauncher(
                environment, self.num_processes, self.num_nodes, check, run=cast(LaunchedRun, self)
            )
            self._launchers = theirs, ours
        return self._launchers[1]
