"""What strategies of several ranks share: a process group, on CPU as on CUDA, checked before anything is launched."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_paral.averaging.callbacks import AveragingCallbacks, forget_ended
from lightning_paral.checkpoint.save_plan import CURRENT_KEY
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.compat.checks import check_names
from lightning_paral.compat.lightning.launchers import SubprocessScriptLauncher
from lightning_paral.data import Injection
from lightning_paral.data.injection import draws_as_one_process
from lightning_paral.data.resume import Position
from lightning_paral.distributed.agreement import all_ranks
from lightning_paral.distributed.launcher import CheckedSubprocessLauncher
from lightning_paral.distributed.process_group import (
    backend_for,
    check_device,
    check_local_rank,
    join_process_group,
)
from lightning_paral.distributed.rng_state import restore_states, without_devices
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.activation_checkpointing import checkpoint_units
from lightning_paral.model.before_launch import check_before_launch
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.option_types import as_timeout
from lightning_paral.options import RANK_DEFAULTS, ActivationCheckpointing, RankOptions, Sampling, as_checkpoint_options
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin
from lightning_paral.strategies.collectives import Collectives
from lightning_paral.strategies.noise import RESUMED_INSIDE_EPOCH, NoiseLeftOut
from lightning_paral.strategies.start_line import print_start_line

_DATA_STATE = "lightning_paral.data"


class ParalStrategy(Collectives, CheckpointMixin, ParallelStrategy):
    """Mixin, placed before the Lightning base: `class ParalDDPStrategy(ParalStrategy, DDPStrategy)`.

    It keeps the sampler injection and the averages of weights of the current run, and reads what the Lightning bases
    hold.
    """

    sampling: Sampling = Sampling()
    """How samples are spread over the ranks."""

    forward_has_collectives: bool = False
    """Whether a forward pass waits for the other ranks, which must then all run as many."""

    _injection: Injection | None = None
    _position: Position | None = None
    """Of the last fit, or of the only run."""
    _data_state: dict[str, Any] | None = None
    _random_states: Sequence[dict[str, Any]] = ()
    _quiet: NoiseLeftOut | None = None
    _activation_checkpointing: ActivationCheckpointing | None = None
    _undo_checkpointing: Callable[[], None] | None = None
    _buffers: RankZeroBuffers | None = None
    """Of a fit."""
    _averages: AveragingCallbacks | None = None
    """Of a run."""
    _loaded_averages: tuple[Mapping[str, Any], bool] | None = None
    """A checkpoint that was loaded before the module was divided, and whether strictly."""
    _averaging_obstacle: str | None = None
    """Why weights cannot be averaged, and what to do."""
    _launchers: tuple[object, CheckedSubprocessLauncher] | None = None
    """Lightning's plugin, and the one that replaces it."""
    process_group_backend: str | None
    timeout: timedelta
    """How long to wait for other ranks."""
    num_nodes: int
    num_processes: int

    def _take_rank_options(self, given: RankOptions) -> dict[str, Any]:
        """Keep the options that all strategies share, and return those that Lightning's constructors take."""
        options = RANK_DEFAULTS | given
        self.sampling = Sampling(
            split=options["split"], remainder=options["remainder"], shard_iterable=options["shard_iterable"]
        )
        self.timeout = as_timeout(options["timeout"])
        self._checkpoint_options = as_checkpoint_options(options["checkpoint"])
        self._activation_checkpointing = options["activation_checkpointing"]
        return {"process_group_backend": options["process_group_backend"], "timeout": self.timeout}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler that Lightning injects where it does that itself."""
        return {"num_replicas": self.dims.data_size, "rank": self.dims.data_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's logging which rank this is.

        The Trainer calls this in every process, at the end of its construction and before it starts other processes, so
        this is where everything that it has set is checked.

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
        self._check_checkpoint_io()

    @property
    def launcher(self) -> Any:
        """The launcher of the other processes: Lightning's, with checks before it and no process left behind."""
        theirs = super().launcher
        if type(theirs) is not SubprocessScriptLauncher:
            return theirs
        if self._launchers is None or self._launchers[0] is not theirs:
            assert self.cluster_environment is not None
            check = partial(check_before_launch, self)
            ours = CheckedSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes, check)
            self._launchers = theirs, ours
        return self._launchers[1]

    def _check_checkpoint_io(self) -> None:
        io = self.checkpoint_io
        if self._default_form == "sharded" and type(io) is not TorchCheckpointIO:
            raise ConfigurationError(
                f"{type(io).__name__} saves what one rank has, and under {type(self).__name__} no rank has everything. "
                "Leave it out. For saving in the background there is CheckpointOptions(async_save=True)."
            )

    def setup_distributed(self) -> None:
        """Join or make the process group. *Collective* over the world."""
        if self._quiet is None:
            self._quiet = NoiseLeftOut()
        self._find_averages()
        self.set_world_ranks()
        if not draws_as_one_process(self.sampling, self.dims.data_size):
            reset_seed()  # as Lightning does with several processes; one goes on where the module's construction ended
        assert self.cluster_environment is not None
        join_process_group(self.cluster_environment, self.root_device, self.process_group_backend, self.timeout)
        self._begin_run()
        self._inject_samplers()
        assert self.lightning_module is not None
        print_start_line(self.lightning_module.trainer, self)

    def checkpoint_activations(self) -> None:
        """Let the units of the module keep only their inputs, if that was asked for, until teardown."""
        if self._activation_checkpointing is not None:
            assert self.lightning_module is not None
            self._undo_checkpointing = checkpoint_units(self.lightning_module, self._activation_checkpointing)

    # Sampler injection

    def _inject_samplers(self) -> None:
        """Spread the loaders of the run that begins, in Lightning's stead. *Collective* over the world."""
        assert self.lightning_module is not None
        seed = os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())
        self._data_state = None
        self._injection = Injection(
            self.lightning_module.trainer,
            self.dims,
            self.sampling,
            self.broadcast(int(seed)),
            run_fillers=self.forward_has_collectives,
        )
        if self._position is None or self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._position = self._injection.position

    def on_train_start(self) -> None:
        """Move to where the checkpoint was in its data."""
        super().on_train_start()
        if self._data_state is not None and self._injection is not None:
            is_inside_epoch = self._injection.position.resume(self._data_state, self._restore_random)
            if is_inside_epoch and self._quiet is not None:
                self._quiet.leave_out(RESUMED_INSIDE_EPOCH)
        self._data_state, self._random_states = None, ()

    def _restore_random(self) -> None:
        if len(self._random_states) == self.world_size:
            restore_states(list(self._random_states), all_ranks(), self._own_devices)
        elif self._random_states and draws_as_one_process(self.sampling, self.dims.data_size):
            # Orders of epochs to come are drawn from rank 0's. Where the module draws nothing, all ranks' are the same.
            of_rank_0 = without_devices(self._random_states[0])
            restore_states([of_rank_0] * self.world_size, all_ranks(), self._own_devices)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, weighted by this rank's share of the samples where shares differ."""
        weight = 1.0 if self._injection is None else self._injection.loss_weight()
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, *args, **kwargs)

    # Buffers

    def on_validation_start(self) -> None:
        """Evaluate rank 0's buffers on all ranks: those that are saved. *Collective* over the world during a fit."""
        super().on_validation_start()
        if self._buffers is not None:
            self._buffers.share()

    def on_train_end(self) -> None:
        """Leave rank 0's buffers in the module on all ranks. *Collective* over the world."""
        super().on_train_end()
        if self._buffers is not None:
            self._buffers.share()

    # Averages of weights

    def _find_averages(self) -> None:
        """Have callbacks that average weights keep averages of this rank's shards.

        Raises:
            ConfigurationError: an averaging function is not elementwise, or weights cannot be averaged.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._default_form == "sharded":
            save_frozen = self._checkpoint_options.save_frozen
            self._averages = AveragingCallbacks(trainer, save_frozen=save_frozen, obstacle=self._averaging_obstacle)

    def _attach_averages(self, make_shards: Callable[[], WeightShards], shares_buffers: bool) -> None:
        if self._averages is not None:
            self._averages.attach(make_shards, shares_buffers=shares_buffers)
            loaded, self._loaded_averages = self._loaded_averages, None
            if loaded is not None:
                self._load_averages(*loaded)

    def _load_averages(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Make what was loaded the averages, and load the weights that the checkpoint has beside them.

        Before the module is divided, only remember to do this later.
        """
        averages = self._averages
        if averages is None or not averages.are_in_state_dict:
            return
        if not averages.are_attached:
            self._loaded_averages = checkpoint, strict
            return
        averages.take_current()
        if CURRENT_KEY in checkpoint:
            self._averages = None
            try:
                self.load_model_state_dict({**checkpoint, "state_dict": checkpoint[CURRENT_KEY]}, strict)
            finally:
                self._averages = averages

    # Checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, and with it where training is in its data. *Collective* over the world."""
        if self._position is not None and "loops" in checkpoint:  # more than weights
            checkpoint = {**checkpoint, _DATA_STATE: self._position.state()}
        with self._sharded_state.reading():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, with the position in the data if training goes on from it. *Collective*."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        data_state = checkpoint.pop(_DATA_STATE, None)
        if self._is_fit:
            self._data_state = data_state
            self._random_states = self._own_state.get("random_states", [])
        elif (trainer := trainer_of(self.lightning_module)) is not None:
            forget_ended(vars(trainer)["callbacks"])
        return checkpoint

    def teardown(self) -> None:
        """Undo the setup. The process group stays for what comes next, except after a failure with several ranks."""
        self._buffers = None
        if self._averages is not None:
            self._averages.end()
            self._averages = self._loaded_averages = None
        if self._injection is not None:
            self._injection.end()
        try:
            super().teardown()
        finally:
            if self._undo_checkpointing is not None:
                self._undo_checkpointing()
                self._undo_checkpointing = None
            if self._quiet is not None:
                self._quiet.end()
                self._quiet = None
            self._end_run()
