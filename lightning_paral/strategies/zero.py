"""ZeRO on DeepSpeed: optimizer state (stage 1), gradients (2) and parameters (3) sharded over the ranks."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.compat.lightning.strategies import layer_sync_of
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.zero.offload import check_offload, check_size, load_operators, make_folders
from lightning_paral.engines.zero.options import ZeROOptions, averaging_obstacle, for_evaluation
from lightning_paral.engines.zero.partition import check_not_partitioned, show_full_shapes
from lightning_paral.engines.zero.precision import ZeROPrecision, as_zero_precision, check_clipping
from lightning_paral.engines.zero.process import check_installed, deepspeed_process_group
from lightning_paral.engines.zero.run import StepsThroughEngine, ZeroRun
from lightning_paral.engines.zero.state import ZeroState
from lightning_paral.engines.zero.user_access import explanation
from lightning_paral.model.checks import (
    check_embeddings,
    check_optimizer_parameters,
    explain,
    explain_errors,
    sync_batchnorm,
)
from lightning_paral.model.deferred.construction import DeferredConstruction, has_mapped_weights, recording
from lightning_paral.option_types import takes
from lightning_paral.strategies.base import ParalStrategy, precision_made_by


class ParalZeROStrategy(ParalStrategy, StepsThroughEngine, DeepSpeedStrategy):
    """Shard optimizer state, gradients and parameters over the ranks, one process per device, with DeepSpeed's ZeRO.

    Select it by name, `Trainer(strategy="paral_zero2")`, or pass an object to set options,
    `Trainer(strategy=ParalZeROStrategy(stage=3, offload_optimizer=Offload("cpu")))`. Follows Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054. Lightning handles
    accumulation, clipping, precision and hooks, as under `paral_ddp`.

    With `precision="bf16-mixed"` or `"16-mixed"`, weights are fp32 and computation runs under autocast. Weights are
    gathered and gradients are averaged in fp32, which gives the numbers of `paral_ddp`. With `"bf16-true"` or
    `"16-true"`, weights have low precision, and the optimizer keeps fp32 master weights; this halves the traffic.

    Options are keyword-only; `__init__` documents them.

    Raises:
        ConfigurationError: options contradict each other, or belong to the Trainer; DeepSpeed is missing or too old.
    """

    strategy_name = "paral_zero"
    precision_plugin = precision_made_by(as_zero_precision)
    _default_form = "sharded"
    _options: ZeROOptions

    @takes(ZeROOptions)
    def __init__(self, options: ZeROOptions) -> None:
        check_installed()
        self.stage = options.stage
        self.strategy_name = options.strategy_name
        self.forward_has_collectives = options.stage == 3
        self.shares_buffers = options.broadcast_buffers
        self._averaging_obstacle = averaging_obstacle(options)
        # Skips DeepSpeedStrategy's constructor, which imports deepspeed before the accelerator is known.
        self._construct_base(partial(DDPStrategy.__init__, self), options, {})
        # DeepSpeedStrategy reads these two.
        self.config: dict[str, Any] = {"zero_optimization": {"stage": options.stage}}
        self.remote_device = None
        self._run_state: ZeroRun | None = None
        """Set from `setup` to `teardown`."""
        self._deferred: DeferredConstruction | None = None

    @property
    def _zero_precision(self) -> ZeROPrecision:
        if not isinstance(self.precision_plugin, ZeROPrecision):
            self.precision_plugin = ZeROPrecision("32-true")
        assert isinstance(self.precision_plugin, ZeROPrecision)
        return self.precision_plugin

    # Process group

    @property
    def root_device(self) -> torch.device:
        """This rank's device. It has an index even on CPU, because DeepSpeed requires one."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    @property
    def dims(self) -> ParallelDims:
        """The arrangement of the ranks: everything that the stage shards is sharded over all ranks."""
        return ParallelDims(rank=self.global_rank, shard=self.world_size)

    def _check_configured(self) -> None:
        super()._check_configured()
        self._options.check_precision(self._zero_precision.precision, self.root_device)
        if self._options.on_nvme:
            check_offload(self._options)
        self._zero_precision.device_type = self.root_device.type

    def setup_environment(self) -> None:
        """Set up the device, and join the process group. *Collective* over the world."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Join or create the process group, and pass it to DeepSpeed. *Collective* over the world."""
        super().setup_distributed()
        assert self.cluster_environment is not None
        ranks = (self.global_rank, self.world_size, self.local_rank)
        level = self._options.logging_level
        self._at_end.enter_context(deepspeed_process_group(self.cluster_environment, ranks, level, self.root_device))
        nvme, name = self._options.on_nvme, self._watch.name
        folders = make_folders(self._options, name, self.global_rank, self._at_end) if nvme else {}
        self.config = self._options.engine_config(self._zero_precision.precision, self.root_device, folders)

    # Model wrapping

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create tensors on the device and in the dtype of the weights."""
        # "cpu" without an index: `from_pretrained` asks for `accelerate` if the device is "cpu:0".
        on_cpu = torch.device("cpu") if self.root_device.type == "cpu" else nullcontext()
        with super().tensor_init_context(empty_init), on_cpu:
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """At stage 3, construct modules on the meta device in `configure_model`; `setup` computes and partitions them.

        Each rank thus keeps only its shard of each parameter.
        """
        if self.stage < 3:
            yield
            return
        with recording(self.lightning_module, self.root_device, self._zero_precision) as deferred:
            yield
        if deferred is None or self.lightning_module is None:
            return
        if self._zero_precision.is_low:  # which converts the module to another dtype
            deferred.defer_loaded(self.lightning_module)
        if not deferred.is_empty or has_mapped_weights(self.lightning_module):
            self._deferred = deferred

    def setup(self, trainer: Trainer) -> None:
        """Create the optimizer and DeepSpeed's engine. *Collective* over the world.

        Raises:
            ConfigurationError: ZeRO cannot train the module, or cannot use the optimizer of `configure_optimizers`.
        """
        module, is_fit = self._begin_setup(trainer)
        check_not_partitioned(module)
        if is_fit:
            sync_batchnorm(module, layer_sync_of(self), self.root_device)
            self._check_fit(module)
        self.model = self._zero_precision.convert_module(module)
        deferred, self._deferred = self._deferred, None
        config = self.config if is_fit else for_evaluation(self.config)
        run = ZeroRun(self, self._options, config, self._ended, deferred)
        self._run_state = run
        if is_fit:
            self._setup_training(run, module)
        else:
            self.model = run.evaluate()
        self.barrier()

    def _check_fit(self, module: LightningModule) -> None:
        """Check what takes no time, before operators are compiled and files are written."""
        if module.trainer.gradient_clip_val:
            check_clipping(module.trainer.gradient_clip_algorithm)
        check_embeddings(module, self.dims.data_size, "ZeRO")
        nvme = self._options.on_nvme
        if nvme:
            threshold = self.config["zero_optimization"].get("stage3_param_persistence_threshold", 100_000)
            check_size(self._options, module, threshold, self.dims.shard, self.num_processes)
            load_operators(next(iter(nvme)))

    def _setup_training(self, run: ZeroRun, module: LightningModule) -> None:
        self.checkpoint_activations()
        with show_full_shapes(module):
            Strategy.setup_optimizers(self, module.trainer)
            self._agreement.check_optimizers()
        check_optimizer_parameters(self.optimizers, module)
        self.model = run.train(self.optimizers)
        if run.trains:
            self._broadcast_buffers()
            self._attach_averages(run.weight_shards)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """`False`: Lightning accumulates gradients, not DeepSpeed."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients in backward passes inside this context."""
        # `ZeROPrecision.backward` does. Lightning's method calls `engine.no_sync`, which stages 2 and 3 reject.
        with self._accumulating_buffers():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step through the engine.

        Raises:
            ConfigurationError: parameters were unfrozen after training began, or used while partitioned.
        """
        self._engine.begin_step()
        with explain_errors(partial(explanation, stage=self.stage)):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, in which gradients are reduced. *Collective* over the world."""
        with explain_errors(partial(explanation, stage=self.stage)):
            return super().backward(closure_loss, *args, **kwargs)

    @property
    def _engine(self) -> ZeroRun:
        assert self._run_state is not None
        return self._run_state

    # Sampler injection: see `ParalStrategy`.

    # Checkpoint: see `CheckpointMixin`. It is a folder to which each rank writes its shards: flat ranges of tensors.

    @property
    def _sharded_state(self) -> ShardedState:
        if self._run_state is not None:
            return self._run_state
        assert self.lightning_module is not None
        return ZeroState(self.lightning_module, self.optimizers, self.root_device, self._ended)

    def _module_is_sharded(self) -> bool:
        # Restoring low-precision weights before `setup` would round the values of the fp32 master weights.
        return self._zero_precision.is_low or super()._module_is_sharded()

    def on_exception(self, exception: BaseException) -> None:
        """Add an explanation to an error that DeepSpeed raised."""
        explain(exception, partial(explanation, stage=self.stage))
        super().on_exception(exception)

    def teardown(self) -> None:
        """Return the module to the user, in full and on the CPU. *Collective* over the world.

        At stage 3, parameters stay partitioned after a failure with several ranks, or if a node lacks the memory for a
        module that was built partitioned.
        """
        failed = self._watch.is_failing and self.world_size > 1  # a collective could hang: other ranks may not call it
        self.model = self.lightning_module
        try:
            if self._run_state is not None:
                self._run_state.restore(self._ended, failed=failed)
        finally:
            self._run_state = self._deferred = None
            super().teardown()
