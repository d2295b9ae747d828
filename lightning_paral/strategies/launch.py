"""Checks of a strategy: in every process when its Trainer is made, and of its module before processes are started."""

from functools import partial
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from lightning_paral.compat.checks import check_names
from lightning_paral.compat.lightning.launchers import SubprocessScriptLauncher
from lightning_paral.distributed.launch_checks import check_device, check_local_rank
from lightning_paral.distributed.launcher import CheckedSubprocessLauncher
from lightning_paral.distributed.process_group import backend_for
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.before_launch import check_before_launch
from lightning_paral.strategies.description import StrategyDescription


class CheckedLaunch(StrategyDescription):
    """Mixin, placed before the Lightning base: report mistakes in one process, before others are started."""

    process_group_backend: str | None
    num_nodes: int
    num_processes: int
    _launchers: tuple[object, CheckedSubprocessLauncher] | None = None
    """Lightning's launcher, and ours, which takes its place."""

    def set_world_ranks(self) -> None:
        """Set this process's rank in the environment and in Lightning's logging, after checks.

        The Trainer calls this in every process, at the end of its construction and before it starts other processes, so
        everything that it has set is checked here.

        Raises:
            ConfigurationError: what the Trainer has set does not fit the strategy.
            PrivateNameError: the installed torch or Lightning lacks a name that this package uses.
        """
        check_names("torch", "lightning")
        self._check_configured()
        super().set_world_ranks()  # type: ignore[misc]

    def _check_configured(self) -> None:
        """Raise a `ConfigurationError` if the Trainer has set something that the strategy does not support."""
        check_local_rank(self.local_rank, self.num_processes)
        check_device(self.root_device)
        backend_for(self.root_device, self.process_group_backend)
        if self._default_form == "sharded" and type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigurationError(
                f"{type(self.checkpoint_io).__name__} saves what one rank has, and under {type(self).__name__} no rank "
                "has everything. Leave it out. For saving in the background there is "
                "CheckpointOptions(async_save=True)."
            )

    @property
    def launcher(self) -> Any:
        """Lightning's launcher of the other processes; where it runs the script again, one that also checks first."""
        theirs = super().launcher
        if type(theirs) is not SubprocessScriptLauncher:
            return theirs
        if self._launchers is None or self._launchers[0] is not theirs:
            assert self.cluster_environment is not None
            check = partial(check_before_launch, self)
            ours = CheckedSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes, check)
            self._launchers = theirs, ours
        return self._launchers[1]
