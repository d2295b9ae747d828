"""Pipeline parallel: consecutive layers of the module on each stage, and micro-batches that pass through the stages."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.compat.lightning.loops import evaluate_without_inference_mode
from lightning_paral.compat.lightning.strategies import layer_sync_of
from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.optimizers import check_optimizers
from lightning_paral.engines.fsdp.refusals import check_user_hooks
from lightning_paral.engines.fsdp.shard import check_module
from lightning_paral.engines.fsdp.step_shards import StepShards
from lightning_paral.engines.pipeline.checks import check_before_fit
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.pipeline.parameters import StageOptimizerState, without_elsewhere
from lightning_paral.engines.pipeline.run import EndedPipelineState, PipelineRun, PipelineState
from lightning_paral.model.deferred.construction import DeferredConstruction, has_mapped_weights, recording
from lightning_paral.option_types import takes
from lightning_paral.strategies.base import ParalStrategy
from lightning_paral.strategies.tensor_parallel import TensorParallel, gather_split


class ParalPipelineStrategy(ParalStrategy, ModelParallelStrategy):
    """Divide the layers of the module among stages, one process per device; micro-batches pass from stage to stage.

    Select it by name, `Trainer(strategy="paral_pp")`, or pass an object to set options,
    `Trainer(strategy=ParalPipelineStrategy(stages=2, micro_batches=8))`. Follows Huang et al., "GPipe",
    arXiv:1811.06965, and for the order of the passes Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training", arXiv:2006.09503. The module needs no changes: `training_step` runs on every stage for each micro-batch,
    and each stage runs its own layers only.

    Options are keyword-only; `__init__` documents them.

    Raises:
        ConfigurationError: options contradict each other, or are out of range.
    """

    strategy_name = "paral_pp"
    forward_has_collectives = True
    _default_form = "sharded"

    _options: PipelineOptions

    @takes(PipelineOptions)
    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.strategy_name = options.strategy_name
        self.shares_buffers = options.broadcast_buffers
        self._has_printed_units = False
        # Set during a run:
        self._deferred: DeferredConstruction | None = None
        self._pipeline: PipelineRun | None = None
        self._shards: StepShards | None = None
        self._tensor: TensorParallel | None = None

    # Process group

    def _check_configured(self) -> None:
        super()._check_configured()
        self._options.check_world_size(self.num_nodes * self.num_processes)

    def setup_environment(self) -> None:
        """Set up the device, and join the process group. *Collective* over the world."""
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of the ranks: stages, each with an equal number of ranks that draw different samples."""
        return self._options.arrange(self.global_rank, self.world_size)

    # Model wrapping

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create tensors in the dtype of the weights, on any device that the user chooses."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Construct modules on the meta device in `configure_model`; `setup` computes the values of this stage only."""
        with recording(self.lightning_module, self.root_device, self.precision_plugin) as deferred:
            yield
        self._deferred = None if deferred is None or deferred.is_empty else deferred

    def setup(self, trainer: Trainer) -> None:
        """Divide the module and create its optimizers. *Collective* over the world.

        Raises:
            ConfigurationError: the module cannot be divided.
        """
        module, is_fit = self._begin_setup(trainer)
        if is_fit:
            check_before_fit(module, self.dims, has_sync_batchnorm=layer_sync_of(self) is not None)
        self.model = self.precision_plugin.convert_module(module)
        if is_fit:
            self.checkpoint_activations()
        self._shards = self._make_shards(module, trainer, is_fit=is_fit)
        self._divide(module)
        if is_fit:
            self._engine.start_fit()
            self.setup_optimizers(trainer)
            if self._shards is not None:
                shards = self._shards
                flush = shards.writes.access.flush
                check_optimizers(self.optimizers, module, shards.original_parameters(), flush, shards.undo)
            self._attach_averages(self._sharded_state.weight_shards)
        self.setup_precision_plugin()
        self.barrier()

    def _make_shards(self, module: LightningModule, trainer: Trainer, *, is_fit: bool) -> StepShards | None:
        """Return what shards this rank's stage; `None` without shards. *Collective* over the ranks of the stage."""
        check_module(module)
        if self.dims.shard == self.dims.tensor == 1:
            return None
        evaluate_without_inference_mode(trainer)
        if is_fit:
            check_user_hooks(module)
        return StepShards(module, self.dims, make_mesh(self.root_device, self.dims))

    def _divide(self, module: LightningModule) -> None:
        shards = self._shards
        in_full = {"in_full": gather_split} if self.dims.tensor > 1 else {}
        run = PipelineRun(module, self._options, self.dims, self.root_device, self._deferred, shards, **in_full)
        if shards is not None:
            shards.set_units(run.division.units)
        if shards is not None and self.dims.tensor > 1:
            self._split(shards, run)
        if not self._has_printed_units:
            rank_zero_info(str(run))
            self._has_printed_units = True
        self._pipeline = run  # set before dividing, so that the teardown restores a module that is partly divided
        run.divide()
        self._deferred = None

    def _split(self, shards: StepShards, run: PipelineRun) -> None:
        """Plan how the layers of this stage are split over its tensor ranks. *Collective* over these."""
        module, stage = run.module, self.dims.stage
        others = {part for each, of_stage in run.division.placed if of_stage != stage for part in each.modules()}
        trainer, per_node = module.trainer, self.num_processes
        self._tensor = TensorParallel(module, self._options, self.dims, shards.mesh, trainer, per_node, others)
        shards.split, run.check_split = self._tensor.split, self._tensor.check

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizer and its schedulers. *Collective* over the world."""
        super().setup_optimizers(trainer)
        if self.dims.pipeline > 1:
            for optimizer in self.optimizers:
                optimizer.state = StageOptimizerState(dict, optimizer.state)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank in backward passes inside this context."""
        self._engine.gradients.accumulates = True
        try:
            with self._accumulating_buffers():
                yield
        finally:
            self._engine.gradients.accumulates = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Give the tensor ranks of a stage the same random states. *Collective* over these when an epoch begins."""
        super().on_train_batch_start(batch, batch_idx)
        if self._tensor is not None and batch_idx == 0:
            self._tensor.share_random_states()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the passes of all micro-batches, and return the mean loss on all stages. *Collective* over the world."""
        if self._tensor is not None:
            self._tensor.begin_step(args[0])
        with self._engine.replacing_step("training_step"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation step, each stage its own units. *Collective* over the world."""
        with self._replacing("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test step, each stage its own units. *Collective* over the world."""
        with self._replacing("test_step"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict step, each stage its own units. *Collective* over the world."""
        with self._replacing("predict_step"):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _replacing(self, step: str) -> Generator[None, None, None]:
        if self._tensor is not None:
            self._tensor.split.begin_step()
        with self._engine.replacing_step(step):
            yield

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. By default, a folder to which each rank writes a part of its stage.

    @property
    def _sharded_state(self) -> ShardedState:
        if self._pipeline is not None:
            return self._state_of(self._pipeline)
        assert self.lightning_module is not None
        return EndedPipelineState(self.lightning_module, self.optimizers, self.root_device, self._ended)

    def _state_of(self, run: PipelineRun) -> PipelineState:
        return PipelineState(run, self.optimizers, self._ended, self.num_processes)

    def _module_is_sharded(self) -> bool:
        assert self.lightning_module is not None
        is_built_late = self._deferred is not None or has_mapped_weights(self.lightning_module)
        return is_built_late or super()._module_is_sharded()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name, with empty shards for the parameters of other stages. *Collective*."""
        if self._pipeline is not None and not self._watch.is_failing:
            self._pipeline.parameters.share_buffers()
        return super().lightning_module_state_dict()

    def _without_others(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = without_elsewhere(checkpoint)
        return kept

    def on_exception(self, exception: BaseException) -> None:
        """Add an explanation to torch's errors about DTensors."""
        super().on_exception(exception)
        if self._shards is not None:
            self._shards.explain(exception)

    @property
    def _engine(self) -> PipelineRun:
        assert self._pipeline is not None
        return self._pipeline

    def teardown(self) -> None:
        """Return the module to the user, in full and on the CPU. *Collective* over the world.

        It stays divided if ranks failed, or if a node lacks the memory for it.
        """
        run, self._pipeline, self._deferred, self._shards, self._tensor = self._pipeline, None, None, None, None
        try:
            if run is not None:
                self._state_of(run).restore(self._ended, failed=self._watch.is_failing and self.world_size > 1)
        finally:
            super().teardown()
