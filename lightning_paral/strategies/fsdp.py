"""Fully sharded data parallel on FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.compat.lightning.loops import evaluate_without_inference_mode
from lightning_paral.compat.lightning.strategies import layer_sync_of, set_device_mesh
from lightning_paral.distributed.mesh import ParallelDims, data_mesh, make_mesh
from lightning_paral.engines.fsdp.gradients import check_precision, sharded_precision
from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.fsdp.run import FSDPRun, FSDPState, check_before_fit
from lightning_paral.engines.fsdp.shard import check_module
from lightning_paral.model.checks import sync_batchnorm
from lightning_paral.model.deferred.construction import DeferredConstruction, has_mapped_weights, recording
from lightning_paral.option_types import takes
from lightning_paral.strategies.base import ParalStrategy, precision_made_by
from lightning_paral.strategies.tensor_parallel import TensorParallel, gather_split


class ParalFSDPStrategy(ParalStrategy, ModelParallelStrategy):
    """Shard every parameter over the ranks, one process per device; a unit is unsharded while it computes.

    Select it by name, `Trainer(strategy="paral_fsdp")`, or pass an object to set options,
    `Trainer(strategy=ParalFSDPStrategy(units=["Block"]))`. Follows Zhao et al., "PyTorch FSDP: Experiences on Scaling
    Fully Sharded Data Parallel", arXiv:2304.11277, and uses torch's `fully_shard`. The module needs no changes.
    Submodules that it shards itself in `configure_model` stay as they are.

    With `precision="bf16-mixed"`, shards are fp32, all-gathers are bf16, computation runs under autocast, and gradients
    are reduced in fp32.

    Options are keyword-only; `__init__` documents them.

    Raises:
        ConfigurationError: options contradict each other, or are out of range.
    """

    strategy_name = "paral_fsdp"
    forward_has_collectives = True
    _default_form = "sharded"

    precision_plugin = precision_made_by(sharded_precision)

    _options: FSDPOptions

    @takes(FSDPOptions)
    def __init__(self, options: FSDPOptions) -> None:
        super().__init__(options)
        self.strategy_name = options.strategy_name
        self.shares_buffers = options.broadcast_buffers
        self._has_printed_units = False
        # Set during a run:
        self._deferred: DeferredConstruction | None = None
        self._fsdp: FSDPRun | None = None
        self._tensor: TensorParallel | None = None

    # Process group

    def _check_configured(self) -> None:
        super()._check_configured()
        self.precision_plugin = self.precision_plugin  # the setter replaces Lightning's default plugin
        check_precision(self.precision_plugin, self.root_device)
        self._options.check_world_size(self.num_nodes * self.num_processes, self.num_processes)

    def setup_environment(self) -> None:
        """Set up the device, join the process group, and create the device mesh. *Collective* over the world."""
        assert self.lightning_module is not None
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()
        set_device_mesh(self.lightning_module, make_mesh(self.root_device, self.dims))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the run, which is that of the module."""
        mesh = None if self.lightning_module is None else self.lightning_module.device_mesh
        if mesh is None:
            raise RuntimeError("Only a run has a device mesh.")
        return mesh

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of the ranks: copies of the model, each sharded over an equal number of groups of ranks."""
        return self._options.arrange(self.global_rank, self.world_size, self.num_processes)

    # Model wrapping

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create tensors in the dtype of the weights, on any device that the user chooses."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Construct modules on the meta device in `configure_model`; `setup` materializes them unit by unit."""
        with recording(self.lightning_module, self.root_device, self.precision_plugin) as deferred:
            yield
        self._deferred = None if deferred is None or deferred.is_empty else deferred

    def setup(self, trainer: Trainer) -> None:
        """Shard the module and create its optimizers. *Collective* over the world.

        Raises:
            ConfigurationError: the module cannot be sharded, or an optimizer cannot update shards.
        """
        module, is_fit = self._begin_setup(trainer)
        evaluate_without_inference_mode(trainer)
        check_module(module)
        if is_fit:
            check_before_fit(module, self.dims)
            sync_batchnorm(module, layer_sync_of(self), self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        if self.dims.tensor > 1:
            self._tensor = TensorParallel(
                module, self._options, self.dims, self.device_mesh, trainer, self.num_processes
            )
        if is_fit:
            self.checkpoint_activations()
        self._shard(module)
        if is_fit:
            self._engine.start_fit(self.timeout)
            self.setup_optimizers(trainer)
            self._engine.add_optimizers(self.optimizers)
            self._attach_averages(self._sharded_state.weight_shards)
        self.setup_precision_plugin()
        self.barrier()

    def _shard(self, module: LightningModule) -> None:
        run = FSDPRun(
            module,
            self._options,
            self.dims,
            data_mesh(self.device_mesh),
            self.root_device,
            self.precision_plugin,
            self._deferred,
            None if self._tensor is None else self._tensor.split,
        )
        if not self._has_printed_units:
            run.print_units()
            self._has_printed_units = True
        self._fsdp = run  # set before sharding, so that the teardown restores a module that is partly sharded
        run.shard()
        self._deferred = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients in backward passes inside this context, according to the option `accumulate`."""
        with self._engine.accumulating(), self._accumulating_buffers():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check that all ranks train the same parameters. *Collective* in the first step of an epoch.

        Raises:
            ConfigurationError: the ranks train different parameters, or a new parameter is not sharded.
        """
        super().on_train_batch_start(batch, batch_idx)
        self._engine.before_batch(batch_idx)
        if self._tensor is not None and batch_idx == 0:
            self._tensor.share_random_states()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step.

        Raises:
            ConfigurationError: a backward pass in manual optimization has left gradients that are not averaged.
        """
        self._engine.check_gradients(optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_end(self) -> None:
        """Raise a `ConfigurationError` if a step has written to weights that were unsharded in 16 bits."""
        self._engine.check_writes()
        super().on_train_end()

    def on_validation_end(self) -> None:
        """Raise a `ConfigurationError` if a step has written to weights that were unsharded in 16 bits."""
        self._engine.check_writes()
        super().on_validation_end()

    def on_test_end(self) -> None:
        """Raise a `ConfigurationError` if a step has written to weights that were unsharded in 16 bits."""
        self._engine.check_writes()
        super().on_test_end()

    def on_predict_end(self) -> None:
        """Raise a `ConfigurationError` if a step has written to weights that were unsharded in 16 bits."""
        self._engine.check_writes()
        super().on_predict_end()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step with the root's parameters unsharded. *Collective* over the world."""
        if self._tensor is not None:
            self._tensor.before_step(self._engine, self.precision_plugin.train_step_context, args)
        return self._gathered(self._engine.training_step(super().training_step, args, kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation step with the root's parameters unsharded. *Collective* over the world."""
        return self._evaluated(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test step with the root's parameters unsharded. *Collective* over the world."""
        return self._evaluated(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict step with the root's parameters unsharded. *Collective* over the world."""
        return self._evaluated(super().predict_step, args, kwargs)

    def _evaluated(self, step: Any, args: Any, kwargs: Any) -> Any:
        if self._tensor is not None:
            self._tensor.before_evaluation(self._engine, step, args)
        return self._gathered(self._engine.evaluation_step(step, args, kwargs))

    def _gathered(self, output: Any) -> Any:
        return output if self._tensor is None else gather_split(output)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, which leaves each rank with its shards of the gradients. *Collective*."""
        loss: Tensor = self._engine.explained(super().backward, closure_loss, *args, **kwargs)
        return loss

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. By default, a folder to which each rank writes its shards, which are DTensors.

    @property
    def _sharded_state(self) -> ShardedState:
        return super()._sharded_state if self._fsdp is None else self._state_of(self._fsdp)

    def _state_of(self, run: FSDPRun) -> FSDPState:
        return FSDPState(run, self.optimizers, self._ended, self._watch.is_failing, self.num_processes)

    def _module_is_sharded(self) -> bool:
        assert self.lightning_module is not None
        is_built_late = self._deferred is not None or has_mapped_weights(self.lightning_module)
        return is_built_late or super()._module_is_sharded()

    def on_exception(self, exception: BaseException) -> None:
        """Add an explanation to torch's errors about DTensors."""
        super().on_exception(exception)
        if self._fsdp is not None:
            self._fsdp.explain(exception)

    @property
    def _engine(self) -> FSDPRun:
        assert self._fsdp is not None
        return self._fsdp

    def teardown(self) -> None:
        """Return the module to the user, in full and on the CPU. *Collective* over the world.

        It stays sharded if ranks failed, or if a node lacks the memory for it.
        """
        run, self._fsdp, self._deferred, self._tensor = self._fsdp, None, None, None
        layer_sync = layer_sync_of(self)
        try:
            if run is not None:
                self._state_of(run).restore(self._ended, failed=self._watch.is_failing and self.world_size > 1)
        finally:
            if run is not None and self.lightning_module is not None:
                set_device_mesh(self.lightning_module, None)
            super().teardown()
            if self.lightning_module is not None and run is not None and layer_sync is not None:
                layer_sync.revert(self.lightning_module)
