"""The base of all strategies with several ranks: what happens in a run, in the order in which it happens."""

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_paral.averaging.run import RunAverages, broadcast_when_swapped, forget_ended
from lightning_paral.callbacks.preemption import Preemption, handle_signals
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.comm.reduce_scatter import gather_rows
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.process_groups import abort_nccl, nccl_backends
from lightning_paral.data.distribute import RunData
from lightning_paral.data.loaders import draws_as_one_process
from lightning_paral.distributed.exchange import RankGroup, any_rank, every_rank
from lightning_paral.distributed.host_allocator import RETURNED_WHILE_BUILDING, FreedInPieces, return_large_tensors
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.process_group import join_process_group, owned_group
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.activation_checkpointing import checkpoint_units
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.engine_attributes import remember_attributes
from lightning_paral.model.user_hooks import trainer_of
from lightning_paral.options import ActivationCheckpointing, RankOptions, Sampling
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin
from lightning_paral.strategies.launch import CheckedLaunch
from lightning_paral.strategies.rank_agreement import RankAgreement
from lightning_paral.strategies.run_watch import RunWatch
from lightning_paral.strategies.start_line import print_start_line


def precision_made_by(convert: Callable[[Precision], Precision]) -> Any:
    """Return a property `precision_plugin` whose setter replaces Lightning's plugin by what `convert` returns."""
    inherited: Any = ParallelStrategy.precision_plugin

    def replace(strategy: Any, plugin: Precision | None) -> None:
        inherited.fset(strategy, None if plugin is None else convert(plugin))

    return property(inherited.fget, replace, doc="The plugin that converts, autocasts, scales and clips.")


class ParalStrategy(CheckpointMixin, ParallelStrategy):
    """Mixin, placed before a Lightning strategy: `class ParalDDPStrategy(ParalStrategy, DDPStrategy)`.

    The contract of a subclass (docs/guides/own-strategy.md shows a complete one):

    - Its `__init__` *must* take one object, a dataclass that derives from `RankOptions`, pass it to `super().__init__`,
      and be decorated with `takes`, which checks options and shows them to `help`, YAML and the shell.
    - It *must* wrap the module and reduce the gradients: override the methods of the Lightning base that do this, such
      as `configure_ddp` and `post_backward`. All ranks must start with equal parameters.
    - It *should* set `strategy_name`, and *must* set `forward_has_collectives = True` if a forward pass of the module
      is collective.
    - It *must* override `dims` unless every rank holds a full replica, and `_sharded_state` if ranks hold shards.
    - It *may* override `make_buffers`, or set `shares_buffers = False`, if the engine broadcasts buffers itself.
    - A method that it overrides *must* call the same method of `super()`. The only exception is a `setup` that itself
      does everything that `setup` of the Lightning base does; in a fit, such a `setup` *must* call
      `checkpoint_activations` before it wraps the module.

    It has its parts as objects, which the methods below call in the order in which things happen: `CheckedLaunch`,
    `RunWatch` (does the run live?), `RunData` (which samples?), `RankZeroBuffers`, `RankAgreement` (are
    the ranks equal?) and `RunAverages`.
    """

    # What describes a strategy. A subclass sets these in its class or its constructor.

    strategy_name: str
    """The registered name, such as `"paral_ddp"`, with which the start line begins.

    If a strategy does not set it, the start line begins with the name of the class.
    """
    forward_has_collectives: bool = False
    """Whether a forward pass of the module is *collective*.

    If so, ranks that run out of evaluation data run padding batches until all ranks have run out.
    """
    shares_buffers: bool = True
    """Whether all ranks train and validate with rank 0's buffers, as under DDP."""
    _averaging_obstacle: str | None = None
    """Why callbacks cannot average weights under this strategy, and what to do; `None` if they can."""
    process_group_backend: str | None
    num_nodes: int
    num_processes: int
    """These three are Lightning's."""
    sampling: Sampling = Sampling()
    """How samples are distributed over the ranks."""

    # Set during a run:
    _buffers: RankZeroBuffers | None = None
    """In a fit."""
    _is_stepping: bool = False
    """Whether an optimizer steps now, and not the training step that its closure runs."""
    _averages: RunAverages | None = None
    """If states are sharded. Otherwise Lightning averages full weights."""
    _freed: FreedInPieces | None = None
    """On CPU with sharded states."""
    _logged_group: dist.ProcessGroup | None = None
    """With several data ranks, the gloo group that reduces values on the CPU, if there is one."""
    _stop_on_sigterm: Preemption | None = None
    """With several ranks, unless the user's `Preemption` handles signals."""

    def __init__(self, options: RankOptions, **keywords: Any) -> None:
        """Keep the options of `RankOptions`, and pass `keywords` to the constructor of the Lightning base."""
        self._construct_base(super().__init__, options, keywords)

    def _construct_base(self, construct: Callable[..., None], options: RankOptions, keywords: dict[str, Any]) -> None:
        """Keep the options that all strategies with ranks take, and call the constructor of the Lightning base."""
        self._options = options
        self.sampling = options.sampling
        self.timeout = self._async_timeout = options.longest_wait
        self._checkpoint_options = options.checkpoint_options
        self._launch = CheckedLaunch(self)
        self._watch = RunWatch(self, self.timeout, self._default_form)
        self._agreement = RankAgreement(self)
        self._data = RunData()
        self._at_end = ExitStack()
        """Undoes at the end of a run what its beginning has changed, in reverse order."""
        construct(process_group_backend=options.process_group_backend, timeout=self.timeout, **keywords)
        for name, given in options.of_trainer.items():
            setattr(self, name, given)

    @property
    def layout(self) -> Any:
        """How a plan counts the strategy with its options; `None` if it cannot be planned."""
        return getattr(self._options, "layout", None)

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing | None:
        """The option `activation_checkpointing`; `None`: no unit recomputes its activations."""
        return self._options.activation_checkpointing

    # Process group

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of the ranks: which ranks draw different samples, and which hold the same tensors.

        By default, every rank holds a full replica and draws different samples.
        """
        return ParallelDims(rank=self.global_rank, replicate=self.world_size)

    def set_world_ranks(self) -> None:
        """Check the Trainer's settings, then set this process's rank in the environment and in Lightning's logging.

        The Trainer calls this in every process, at the end of its construction, before it starts other processes.
        Under torchrun, the number of nodes is that of torchrun: with `--nnodes 1:2` it may change at each restart.

        Raises:
            ConfigurationError: the Trainer's settings do not fit the strategy.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
        """
        self._launch.check_environment()
        self._check_configured()
        super().set_world_ranks()  # type: ignore[misc]
        self._launch.check_world_size()

    def _check_configured(self) -> None:
        """Raise a `ConfigurationError` if the strategy does not support the Trainer's settings."""
        self._launch.check_settings()

    @property
    def launcher(self) -> Any:
        """Our version of Lightning's launcher of the other processes; Lightning's own if it is of another kind."""
        return self._launch.launcher(super().launcher)

    def setup_distributed(self) -> None:
        """Begin a run: join or create the process group, and distribute the loaders. *Collective* over the world.

        Raises:
            ConfigurationError: the Trainer's settings do not fit the strategy, or differ between ranks; an averaging
                callback cannot work.
            PrivateNameError: the installed torch or Lightning lacks a private name that this package uses.
            ProcessGroupError: not all ranks joined within `timeout`.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._watch.why_interrupted = ""
        self._prepare_process(trainer)
        self._join()
        self._watch.begin()
        # In the group of the gradients, gloo would end the process if one rank reduces a value while another one
        # reduces a gradient.
        if self.dims.data_size > 1:
            self._logged_group = self.dims.group_for_only("logged values", self.timeout)
        self._agreement.check_settings(trainer)
        self._stop_on_sigterm = handle_signals(trainer)
        if self._stop_on_sigterm is not None:
            self._at_end.callback(self._stop_on_sigterm.end)
        seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))
        self._data.begin(trainer, self.dims, self.sampling, seed, forward_has_collectives=self.forward_has_collectives)
        self._at_end.callback(self._data.end)
        if self._watch.watching is not None:  # last: it waits before what ends an epoch
            self._agreement.begin(trainer, self._watch.watching.watcher, self._at_end)
        if self._is_fit:
            if self.world_size > 1 and self.lightning_module.automatic_optimization:
                self._at_end.callback(register_optimizer_step_pre_hook(self._refuse_own_step).remove)
            self._print_start_line(trainer)

    def _prepare_process(self, trainer: Trainer) -> None:
        """Change what has to be changed before the ranks join and callbacks are set up."""
        if self._default_form == "sharded":
            save_frozen = self._checkpoint_options.save_frozen
            self._averages = RunAverages(trainer, save_frozen=save_frozen, obstacle=self._averaging_obstacle)
            self._at_end.callback(self._averages.end)
            if self.root_device.type == "cpu":
                return_large_tensors(RETURNED_WHILE_BUILDING)
                self._freed = FreedInPieces()

    def _join(self) -> None:
        assert self.cluster_environment is not None
        self.set_world_ranks()
        if not draws_as_one_process(self.sampling, self.dims.data_size):
            reset_seed()  # as Lightning does with several processes; one process continues the generators' sequence
        join_process_group(self.cluster_environment, self.root_device, self.process_group_backend, self.timeout)

    def _print_start_line(self, trainer: Trainer) -> None:
        print_start_line(trainer, self)

    @property
    def watch(self) -> RunWatch:
        """What knows whether the run lives."""
        return self._watch

    @property
    def _is_running(self) -> bool:
        return self._watch.is_in_run

    def on_exception(self, exception: BaseException) -> None:
        """Abort NCCL: a rank that failed in a step leaves work on its device that waits for the other ranks."""
        super().on_exception(exception)
        if self.world_size > 1 and nccl_backends() and owned_group() is not None:
            abort_nccl()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. *Collective*; nothing without a process group, or after a failure of some ranks."""
        ranks, device = self._watch.reachable(), self.root_device
        if ranks is not None:
            on_cuda = device.type == "cuda" and ranks.group is None
            dist.barrier(group=ranks.group, device_ids=[device.index] if on_cuda else None)
        if name == "run-stage" and self._stop_on_sigterm is not None and self.lightning_module is not None:
            # Lightning has set its handlers of signals.
            self._stop_on_sigterm.on_validation_start(self.lightning_module.trainer, self.lightning_module)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the `obj` of rank `src`, or after a failure of some ranks that of this one. *Collective*."""
        ranks, objects = self._watch.reachable(), [obj]
        if ranks is not None:
            dist.broadcast_object_list(objects, src, group=ranks.group)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` over the ranks, in place, and return it. *Collective* over `group`.

        Unlike Lightning's method, this one averages CPU tensors in CUDA runs as well, and has no extra barrier.

        Args:
            tensor: a tensor of any dtype, on the CPU or on this rank's device. Other objects are returned unchanged.
            group: the process group; `None` means all data ranks.
            reduce_op: `"mean"`, a `ReduceOp`, or the name of one.

        Returns:
            Any: `tensor`. For the mean of integers, a new floating-point tensor, which Lightning needs to count the
                samples of logged values. After a failure, `tensor` is unchanged.
        """
        ranks = self._watch.reachable() if isinstance(tensor, Tensor) else None
        if ranks is None or ranks.group is not None:  # after a failure
            return tensor
        average = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        if average:
            operation = dist.ReduceOp.SUM  # gloo has no AVG
        else:
            operation = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        num_ranks = self.dims.data_size if group is None else dist.get_world_size(group)
        if group is None:
            is_logged = self._logged_group is not None and tensor.device.type == "cpu"
            group = self._logged_group if is_logged else self.dims.data_group()
        dist.all_reduce(tensor, op=operation, group=group)
        if average:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor / num_ranks
            tensor.div_(num_ranks)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of the ranks, stacked. *Collective* over `group`.

        Args:
            tensor: a tensor with the same shape on all ranks.
            group: the process group. `None` and the default group, which `LightningModule.all_gather` gives, mean all
                data ranks, so that each sample counts once.
            sync_grads: whether gradients flow to the tensors of all ranks.
        """
        is_default = dist.is_initialized() and group in (None, dist.group.WORLD)
        data_group = self.dims.data_group() if is_default else None
        if data_group is None:
            return super().all_gather(tensor, group, sync_grads)
        # torch's own function confuses ranks of a group with global ranks in its backward pass on gloo (torch 2.13).
        return gather_rows((tensor if sync_grads else tensor.detach()).unsqueeze(0), data_group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether `decision` is true on all ranks or, with `all=False`, on any. *Collective* over all ranks."""
        ranks = self._watch.reachable()
        if ranks is None:
            return decision
        group = ranks.group
        if group is None and self.dims.data_size == self.dims.num_ranks:
            group = self._logged_group
        return every_rank(decision, group) if all else any_rank(decision, group)

    # Model wrapping

    def checkpoint_activations(self) -> None:
        """Apply the option `activation_checkpointing` to the module; `teardown` undoes it."""
        if self.lightning_module is not None and self.activation_checkpointing is not None:
            self._at_end.callback(checkpoint_units(self.lightning_module, self.activation_checkpointing))

    def setup(self, trainer: Trainer) -> None:
        """Set up the module; in a fit, apply the option `activation_checkpointing`. *Collective* over the world.

        Raises:
            ConfigurationError: the ranks have different parameters or optimizers.
        """
        self._agreement.check_module(trains=self._is_fit)
        self._remember_attributes()
        if self._is_fit:
            self.checkpoint_activations()
        super().setup(trainer)

    def _remember_attributes(self) -> None:
        if self._default_form == "sharded" and self.lightning_module is not None:
            self._at_end.callback(remember_attributes(self.lightning_module))

    def _begin_setup(self, trainer: Trainer) -> tuple[LightningModule, bool]:
        """Begin a `setup` that does not call that of the Lightning base; return the module, and whether to train it.

        Raises:
            ConfigurationError: the ranks have different parameters.
        """
        assert self.lightning_module is not None
        assert self.accelerator is not None
        self._restores_after_setup = self.restore_checkpoint_after_setup
        self._remember_attributes()
        self.accelerator.setup(trainer)
        self._agreement.check_module(trains=self._is_fit)
        return self.lightning_module, self._is_fit

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers and schedulers. *Collective* over the world.

        Raises:
            ConfigurationError: the ranks have different optimizers.
        """
        super().setup_optimizers(trainer)
        self._agreement.check_optimizers()

    def make_buffers(self) -> RankZeroBuffers:
        """Return the object that gives all ranks rank 0's buffers during a fit.

        They are broadcast before the training step that begins an accumulation window, at the start of validation, and
        at the end of training. Validation therefore evaluates the buffers that checkpoints contain. Override this if
        the engine broadcasts buffers at some of these times itself.
        """
        assert self.lightning_module is not None
        return RankZeroBuffers(self.lightning_module, self.shares_buffers, self.dims)

    def _fit_buffers(self) -> RankZeroBuffers | None:
        """Return what broadcasts the buffers, made by the first call in a fit; `None` in evaluation."""
        # Made on demand, so that a subclass that overrides `setup` cannot forget it.
        if self._buffers is None and self._is_fit:
            self._buffers = self.make_buffers()
            if self._averages is None:  # otherwise our averaging callbacks share the averages
                self._at_end.callback(broadcast_when_swapped(self._buffers))
        return self._buffers

    def _attach_averages(self, make_shards: Callable[[], WeightShards]) -> None:
        """Start averaging weights if a callback asks for it; call this after sharding. *Collective* over the world."""
        if self._averages is not None:
            self._averages.attach(make_shards, self._fit_buffers(), super().load_model_state_dict)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients in backward passes inside this context."""
        with super().block_backward_sync(), self._accumulating_buffers():
            yield

    def _accumulating_buffers(self) -> AbstractContextManager[None]:
        """Return a context in which training steps do not end an accumulation window."""
        buffers = self._fit_buffers()
        return buffers.accumulating() if buffers is not None and buffers.in_training else nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step with rank 0's buffers. *Collective* over the world.

        Raises:
            ConfigurationError: under automatic optimization, the step returned `None`.
        """
        buffers = self._buffers or self._fit_buffers()
        if buffers is not None and buffers.in_training:
            buffers.before_training_step()
        is_stepping, self._is_stepping = self._is_stepping, False
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._is_stepping = is_stepping
        module = self.lightning_module
        if output is None and module is not None and module.automatic_optimization and self.dims.num_ranks > 1:
            trainer = module.trainer
            raise ConfigurationError(
                f"training_step returned None on rank {self.dims.rank}, for batch "
                f"{trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}. With several ranks no rank "
                "can skip a step, because gradients are averaged over all of them. Return a loss that is zero instead, "
                "such as 0 * loss."
            )
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass. If ranks have different numbers of samples, weight the loss by this rank's number."""
        weight, steps = self._data.loss_weight(), self._agreement.steps
        if weight != 1.0:
            closure_loss = closure_loss * weight
        if steps is not None and getattr(self.model, "require_backward_grad_sync", True):
            steps.backwards += 1
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step, and count it."""
        self._is_stepping = True
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_stepping = False
        if self._agreement.steps is not None:
            self._agreement.steps.optimizer_steps += 1
        return result

    def _refuse_own_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step that this strategy does not run, because its gradients are of this rank only."""
        if self._is_stepping or not self.optimizers or self.lightning_module is None:  # a plan steps before these exist
            return
        groups = [group for each in self.optimizers for group in each.param_groups]
        trained = {id(p) for group in groups for p in group["params"]} | set(
            map(id, self.lightning_module.parameters())
        )
        if any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step was called in a step or hook under automatic optimization, with "
                "parameters of the module. The strategy does not run this step, so gradients may be of this rank only. "
                "In optimizer_step, call the step of the optimizer that it is given. Otherwise set "
                "self.automatic_optimization = False, return all optimizers from configure_optimizers, and call "
                "self.manual_backward(loss) and the steps of self.optimizers() in training_step."
            )

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world during a fit."""
        super().on_validation_start()
        self._broadcast_buffers()

    def on_train_end(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world."""
        super().on_train_end()
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.broadcast()

    # Sampler injection

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the `DistributedSampler`, for loaders into which Lightning itself injects one."""
        return {"num_replicas": self.dims.data_size, "rank": self.dims.data_rank}

    def on_train_start(self) -> None:
        """Move to the position in the data of a loaded checkpoint. *Collective* over the world if it has one."""
        super().on_train_start()
        trainer = trainer_of(self.lightning_module)
        if self._data.resume(self._own_devices) and trainer is not None:
            _silence_resume(trainer.fit_loop.epoch_loop)
        if self._stop_on_sigterm is not None and self.lightning_module is not None:
            self._stop_on_sigterm.on_train_start(self.lightning_module.trainer, self.lightning_module)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Return freed host memory to the system before the first steps, if states are sharded on CPU."""
        super().on_train_batch_start(batch, batch_idx)
        if self._freed is not None and not self._freed.is_done and self.lightning_module is not None:
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
        if self._launch.leaves_save_to_ranks(self.launcher, checkpoint, filepath):
            return
        with self._sharded_state.reading():
            checkpoint = self._data.with_position(checkpoint, with_all_ranks=not self._watch.is_failing)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _saving_ranks(self, checkpoint: dict[str, Any], filepath: Any) -> RankGroup | None:
        has_failed = self._watch.is_failing and self._watch.watching is not None
        if not has_failed:
            return super()._saving_ranks(checkpoint, filepath)
        if self._default_form == "sharded":
            return self._watch.reachable()
        return RankGroup() if self.global_rank == 0 else None

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; in a fit, load the position in the data as well. *Collective* over the world.

        Raises:
            CheckpointError: it is missing or damaged, has untrusted code, or has no optimizer state to resume from.
        """
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._data.load(checkpoint, self._own_state.get("random_states", []) if self._is_fit else None)
        trainer = trainer_of(self.lightning_module)
        if trainer is not None and not self._is_fit:
            forget_ended(vars(trainer)["callbacks"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, of which each rank reads what it holds, and the callbacks' averages of weights."""
        super().load_model_state_dict(checkpoint, strict)
        if self._averages is not None:
            self._averages.load(checkpoint, strict, super().load_model_state_dict)

    def teardown(self) -> None:
        """End the run. The next run reuses the process group, except after a failure with several ranks."""
        with ExitStack() as ends:  # each is called, also after an error of another, the last one first
            ends.callback(self._watch.end)
            ends.callback(setattr, self, "_logged_group", None)
            ends.callback(super().teardown)
            ends.enter_context(self._at_end.pop_all())
            self._buffers = self._averages = self._freed = self._stop_on_sigterm = None


def _silence_resume(epoch_loop: Any) -> None:
    """Let the next `reset` of the epoch's loop not warn of a resume within the epoch, which is exact here."""
    undo, reset = ExitStack(), epoch_loop.reset

    def reset_silently() -> None:
        undo.close()
        with warnings.catch_warnings():  # only here: filters that user code adds in the fit have to stay
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            reset()

    shadow_method(epoch_loop, "reset", reset_silently, undo)
