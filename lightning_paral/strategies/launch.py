"""Check a strategy when its Trainer is created, and its module before other processes are started."""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_paral.compat.checks import check_names
from lightning_paral.compat.lightning.launchers import LightningSubprocessLauncher
from lightning_paral.distributed.launching.cluster_checks import check_environment, check_ranks
from lightning_paral.distributed.launching.launch_checks import check_device, check_local_rank
from lightning_paral.distributed.launching.launcher import CheckedSubprocessLauncher, LaunchedRun
from lightning_paral.distributed.launching.start_method import choose_start_method, restoring_environment
from lightning_paral.distributed.process_group import backend_for
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.before_launch import check_before_launch
from lightning_paral.options import StartMethod
from lightning_paral.strategies.description import StrategyDescription
from lightning_paral.strategies.process_launcher import ProcessLauncher


class _Launcher(CheckedSubprocessLauncher):
    """Runs the script again, or a single rank in this process."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Start the other local ranks, and run this one."""
        # Other local ranks outlive the run, and join the next one, which is to see that they were started.
        with restoring_environment() if self.num_processes == 1 else nullcontext():
            return super().launch(*args, **kwargs)


class CheckedLaunch(StrategyDescription):
    """Mixin, placed before the Lightning base: report mistakes before other processes are started."""

    process_group_backend: str | None
    num_nodes: int
    num_processes: int
    _launchers: tuple[object, CheckedSubprocessLauncher] | None = None
    """Lightning's launcher, and ours, which replaces it."""
    _process_launcher: ProcessLauncher | None = None
    _given_start_method: StartMethod | None = None
    has_fit_in_ranks: bool = False
    """Whether the last fit ran in forked or spawned ranks, which have ended together with their optimizers."""

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
            ours = _Launcher(environment, self.num_processes, self.num_nodes, check, run=cast(LaunchedRun, self))
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
        if self.has_fit_in_ranks and "optimizer_states" in checkpoint:
            raise ConfigurationError(
                f"{filepath} was not saved: the ranks of the last fit have ended, and the state of their optimizers "
                "with them. Save during the fit, for example with ModelCheckpoint(save_last=True), or save the weights "
                "only: trainer.save_checkpoint(path, weights_only=True)."
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)
