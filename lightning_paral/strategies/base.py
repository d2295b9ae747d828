"""The base of all strategies with several ranks: process group, sampler injection and checkpoint."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from lightning_paral.averaging.run import RunAverages, broadcast_when_swapped, forget_ended
from lightning_paral.callbacks.preemption import Preemption, handle_signals
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.data.distribute import RunData
from lightning_paral.data.loaders import draws_as_one_process
from lightning_paral.distributed.host_allocator import RETURNED_WHILE_BUILDING, FreedInPieces, return_large_tensors
from lightning_paral.distributed.process_group import join_process_group
from lightning_paral.model.activation_checkpointing import checkpoint_units
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.trainer_of import trainer_of
from lightning_paral.options import RankOptions, Sampling
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin
from lightning_paral.strategies.collectives import Collectives
from lightning_paral.strategies.description import StrategyDescription
from lightning_paral.strategies.launch import CheckedLaunch
from lightning_paral.strategies.library_warnings import RESUMED_INSIDE_EPOCH, IgnoredWarnings
from lightning_paral.strategies.rank_agreement import RankAgreement
from lightning_paral.strategies.start_line import print_start_line


class SharedBuffers(StrategyDescription):
    """Mixin, placed before the Lightning base: every rank trains and validates with rank 0's buffers.

    They are broadcast before the training step that begins an accumulation window, at the start of validation, and at
    the end of training. Validation therefore evaluates the buffers that checkpoints contain.
    """

    _buffers: RankZeroBuffers | None = None
    """Set during a fit."""
    _undo_broadcast_of_averages: Callable[[], None] | None = None

    def make_buffers(self) -> RankZeroBuffers:
        """Return the object that broadcasts the buffers during a fit.

        Override this if the engine broadcasts buffers at some of these times itself.
        """
        assert self.lightning_module is not None
        return RankZeroBuffers(self.lightning_module, self.shares_buffers, self.dims)

    def _fit_buffers(self) -> RankZeroBuffers | None:
        """Return the object that broadcasts the buffers, created by the first call in a fit; `None` in evaluation."""
        # Created on demand, so that a subclass that overrides `setup` cannot forget to create it.
        if self._buffers is None and self._is_fit:
            self._buffers = self.make_buffers()
            if self._default_form == "full":  # otherwise our averaging callbacks share the averages
                self._undo_broadcast_of_averages = broadcast_when_swapped(self._buffers)
        return self._buffers

    def _end_buffers(self) -> None:
        self._buffers = None
        if self._undo_broadcast_of_averages is not None:
            self._undo_broadcast_of_averages()
            self._undo_broadcast_of_averages = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients in backward passes inside this context."""
        with super().block_backward_sync(), self._accumulating_buffers():
            yield

    def _accumulating_buffers(self) -> AbstractContextManager[None]:
        """Return a context in which training steps do not end an accumulation window."""
        buffers = self._fit_buffers()
        return nullcontext() if buffers is None else buffers.accumulating()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step with rank 0's buffers. *Collective* over the world."""
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.before_training_step()
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world during a fit."""
        super().on_validation_start()
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.broadcast()

    def on_train_end(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world."""
        super().on_train_end()
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.broadcast()


class ParalStrategy(CheckedLaunch, SharedBuffers, RankAgreement, Collectives, CheckpointMixin, ParallelStrategy):
    """Mixin, placed before a Lightning strategy: `class ParalDDPStrategy(ParalStrategy, DDPStrategy)`.

    The contract of a subclass (docs/guides/own-strategy.md shows a complete one):

    - Its `__init__` *must* take one object, a dataclass that derives from `RankOptions`, pass it to `super().__init__`,
      and be decorated with `takes`, which checks options and shows them to `help`, YAML and the shell.
    - It *must* wrap the module and reduce the gradients: override the methods of the Lightning base that do this, such
      as `configure_ddp` and `post_backward`. All ranks must start with equal parameters.
    - It *should* set `strategy_name`, and *must* set `forward_has_collectives = True` if a forward pass of the module
      is collective. `StrategyDescription` documents all attributes that describe a strategy.
    - It *must* override `dims` unless every rank holds a full replica, and `_sharded_state` if ranks hold shards.
    - It *may* override `make_buffers`, or set `shares_buffers = False`, if the engine broadcasts buffers itself.
    - A method that it overrides *must* call the same method of `super()`. The only exception is a `setup` that itself
      does everything that `setup` of the Lightning base does; in a fit, such a `setup` *must* call
      `checkpoint_activations` before it wraps the module.

    `teardown` and the checkpoint methods run in this order: subclass, this class, `CheckpointMixin`, Lightning base.
    """

    sampling: Sampling = Sampling()
    """How samples are distributed over the ranks."""

    _data: RunData
    _averages: RunAverages | None = None
    _freed: FreedInPieces | None = None
    """On CPU with sharded states."""
    _ignored_warnings: IgnoredWarnings | None = None
    _stop_on_sigterm: Preemption | None = None
    """With several ranks, unless the user's `Preemption` handles signals."""
    _undo_recomputation: Callable[[], None] | None = None

    def __init__(self, options: RankOptions, **keywords: Any) -> None:
        """Keep the options of `RankOptions`, and pass `keywords` to the constructor of the Lightning base."""
        self._construct_base(super().__init__, options, keywords)

    def _construct_base(self, construct: Callable[..., None], options: RankOptions, keywords: dict[str, Any]) -> None:
        """Keep the options that all strategies with ranks take, and call the constructor of the Lightning base."""
        self.sampling = options.sampling
        self.timeout = self._async_timeout = options.longest_wait
        self._checkpoint_options = options.checkpoint_options
        self._activation_checkpointing = options.activation_checkpointing
        self._given_start_method = options.start_method
        self.divergence_check_every = options.divergence_check_every
        self._data = RunData()
        construct(process_group_backend=options.process_group_backend, timeout=self.timeout, **keywords)
        for name, given in options.of_trainer.items():
            setattr(self, name, given)

    # Process group

    def setup_distributed(self) -> None:
        """Begin a run: join or create the process group, and distribute the loaders. *Collective* over the world.

        Raises:
            ConfigurationError: the Trainer's settings do not fit the strategy, or differ between ranks; an averaging
                callback cannot work.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
            ProcessGroupError: not all ranks joined within `timeout`.
        """
        assert self.lightning_module is not None
        assert self.cluster_environment is not None
        trainer = self.lightning_module.trainer
        self._why_interrupted = ""
        if self._ignored_warnings is None:
            self._ignored_warnings = IgnoredWarnings()
        if self._default_form == "sharded" and self.root_device.type == "cpu":
            return_large_tensors(RETURNED_WHILE_BUILDING)
            self._freed = FreedInPieces()
        if self._default_form == "sharded":
            save_frozen = self._checkpoint_options.save_frozen
            self._averages = RunAverages(trainer, save_frozen=save_frozen, obstacle=self._averaging_obstacle)
        self.set_world_ranks()
        if not draws_as_one_process(self.sampling, self.dims.data_size):
            reset_seed()  # as Lightning does with several processes; one process continues the generators' sequence
        join_process_group(self.cluster_environment, self.root_device, self.process_group_backend, self.timeout)
        self._begin_run()
        self._check_same_settings(trainer)
        self._stop_on_sigterm = handle_signals(trainer)
        seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))
        self._data.begin(trainer, self.dims, self.sampling, seed, forward_has_collectives=self.forward_has_collectives)
        self._begin_agreement(trainer)
        self._print_start_line(trainer)

    def _print_start_line(self, trainer: Trainer) -> None:
        print_start_line(trainer, self)

    # Model wrapping

    def checkpoint_activations(self) -> None:
        """Apply the option `activation_checkpointing` to the module; `teardown` undoes it."""
        if self.lightning_module is not None and self._activation_checkpointing is not None:
            self._undo_recomputation = checkpoint_units(self.lightning_module, self._activation_checkpointing)

    def setup(self, trainer: Trainer) -> None:
        """Set up the module; in a fit, apply the option `activation_checkpointing`. *Collective* over the world.

        Raises:
            ConfigurationError: the ranks have different parameters or optimizers.
        """
        self._check_same_module()
        if self._is_fit:
            self.checkpoint_activations()
        super().setup(trainer)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass. If ranks have different numbers of samples, weight the loss by this rank's number."""
        weight = self._data.loss_weight()
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, *args, **kwargs)

    def _attach_averages(self, make_shards: Callable[[], WeightShards]) -> None:
        """Start averaging weights if a callback asks for it; call this after sharding. *Collective* over the world."""
        if self._averages is not None:
            self._averages.attach(make_shards, self._fit_buffers(), self.load_model_state_dict)

    # Sampler injection

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the `DistributedSampler`, for loaders into which Lightning itself injects one."""
        return {"num_replicas": self.dims.data_size, "rank": self.dims.data_rank}

    def on_train_start(self) -> None:
        """Move to the position in the data of a loaded checkpoint. *Collective* over the world if it has one."""
        super().on_train_start()
        if self._data.resume(self._own_devices) and self._ignored_warnings is not None:
            self._ignored_warnings.add(RESUMED_INSIDE_EPOCH)
        if self._stop_on_sigterm is not None and self.lightning_module is not None:
            self._stop_on_sigterm.on_train_start(self.lightning_module.trainer, self.lightning_module)

    def on_validation_start(self) -> None:
        """Take the signals from Lightning, with several ranks."""
        super().on_validation_start()
        self._take_signals()

    def on_test_start(self) -> None:
        """Take the signals from Lightning, with several ranks."""
        super().on_test_start()
        self._take_signals()

    def on_predict_start(self) -> None:
        """Take the signals from Lightning, with several ranks."""
        super().on_predict_start()
        self._take_signals()

    def _take_signals(self) -> None:
        if self._stop_on_sigterm is not None and self.lightning_module is not None:
            self._stop_on_sigterm.on_validation_start(self.lightning_module.trainer, self.lightning_module)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Return freed host memory to the system before the first steps, if states are sharded on CPU."""
        super().on_train_batch_start(batch, batch_idx)
        if self._freed is not None and self.lightning_module is not None:
            module = self.lightning_module
            self._freed.before_batch(module.trainer.global_step, module.parameters())

    # Checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save `checkpoint` and the position in the data. *Collective* over the world during a run.

        Raises:
            CheckpointError: a rank could not write; raised on all ranks. An earlier checkpoint at `filepath` is intact.
            ConfigurationError: the optimizer's state was lost at the end of the run.
            StorageOptionsError: `storage_options` were given, but no `CheckpointIO` that accepts them.
        """
        with self._sharded_state.reading():
            checkpoint = self._data.with_position(checkpoint, with_all_ranks=not self._is_failing)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; in a fit, load the position in the data as well. *Collective* over the world.

        Raises:
            CheckpointError: it is missing or damaged, has untrusted code, or has no optimizer state to resume from.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._data.load(checkpoint, self._own_state.get("random_states", []) if self._is_fit else None)
        trainer = trainer_of(self.lightning_module)
        if trainer is not None and not self._is_fit:
            forget_ended(vars(trainer)["callbacks"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, of which each rank reads only its shards, and the callbacks' averages of weights."""
        super().load_model_state_dict(checkpoint, strict)
        if self._averages is not None:
            self._averages.load(checkpoint, strict, self.load_model_state_dict)

    def teardown(self) -> None:
        """End the run. The next run reuses the process group, except after a failure with several ranks."""
        with ExitStack() as at_end:
            at_end.callback(self._end_run)
            if self._ignored_warnings is not None:
                at_end.callback(self._ignored_warnings.end)
                self._ignored_warnings = None
            if self._undo_recomputation is not None:
                at_end.callback(self._undo_recomputation)
                self._undo_recomputation = None
            at_end.callback(super().teardown)
            if self._stop_on_sigterm is not None:
                at_end.callback(self._stop_on_sigterm.end)
                self._stop_on_sigterm = None
            at_end.callback(self._data.end)
            if self._averages is not None:
                at_end.callback(self._averages.end)
                self._averages = None
            at_end.callback(self._end_agreement)
            self._end_buffers()
