"""ZeRO on DeepSpeed: optimizer state (stage 1), gradients (2) and parameters (3) sharded over the ranks."""

import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.compat.lightning.strategies import layer_sync_of, set_forward_redirection
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.zero.engine.construction import built_partitioned
from lightning_paral.engines.zero.engine.explain_errors import explanation
from lightning_paral.engines.zero.engine.hooks import allow_accumulation_schedules
from lightning_paral.engines.zero.engine.precision import ZeROPrecision
from lightning_paral.engines.zero.options import ZeROOptions, as_offload, averaging_obstacle
from lightning_paral.engines.zero.parameters.partition import full_shapes_shown, rejoin
from lightning_paral.engines.zero.run import RunSettings, ZeroRun, check_run
from lightning_paral.engines.zero.runtime.config import PRECISIONS, load_config
from lightning_paral.engines.zero.runtime.deepspeed import check_installed, deepspeed_joined
from lightning_paral.engines.zero.runtime.nvme import RunFolders, load_async_io
from lightning_paral.engines.zero.runtime.operators import operators_kept
from lightning_paral.engines.zero.state.zero_state import ZeroState
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.batchnorm import sync_batchnorm
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.model.explain_errors import explain, explained
from lightning_paral.model.foreign_parameters import check_averaged
from lightning_paral.options import Offload, RankOptions, takes_rank_options
from lightning_paral.strategies.base import ParalStrategy


class ParalZeROStrategy(ParalStrategy, DeepSpeedStrategy):
    """One process per device, with optimizer state, gradients and parameters sharded over all; DeepSpeed's ZeRO.

    Selected by name, `Trainer(strategy="paral_zero2")`, or as an object where options are wanted,
    `Trainer(strategy=ParalZeROStrategy(stage=3, offload_optimizer=Offload("cpu")))`. Follows Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054. Accumulation, clipping,
    precision and hooks are Lightning's, as under `paral_ddp`.

    `precision="bf16-mixed"` and `"16-mixed"` are autocast over fp32 weights, which are gathered, and their gradients
    averaged, in fp32: the numbers of `paral_ddp`. `"bf16-true"` and `"16-true"` keep low-precision weights with fp32
    master copies in the optimizer, and send half as much.

    Args:
        stage: what is sharded: 1 the optimizer state, 2 also gradients, 3 also parameters.
        offload_optimizer: keep optimizer state and fp32 parameters on the host, and update them there. torch's Adam
            and AdamW are replaced by `DeepSpeedCPUAdam` with the same hyper-parameters. `"cpu"` is short for
            `Offload("cpu")`, `"nvme"` for an `Offload` to the folder named by the environment's PARAL_NVME_PATH.
        offload_parameters: at stage 3, keep parameters on the host or on NVMe while they are not used.
        trust_optimizer: take an optimizer though a trial finds that it is not elementwise, or cannot tell. ZeRO gives
            it flattened shards of parameters.
        find_unused_parameters: let ranks agree in every step which parameters got no gradient, as in
            `DistributedDataParallel`; they keep their values. Otherwise the first step decides which never get one, and
            gradients that come in another order later are an error: ranks reduce them by position.
        overlap_comm: reduce gradients on a stream of its own while the backward pass runs. `None`: on CUDA with
            several ranks. On CPU there are no streams.
        reduce_bucket_numel: elements of gradients reduced at a time. `None`: 50 million, or all if there are fewer.
        gather_bucket_numel: elements of parameters gathered at a time; at stage 3, ahead of use. `None`: likewise.
        deepspeed_config: anything else of DeepSpeed's configuration, as a dict or a JSON file.
        broadcast_buffers: give all ranks rank 0's buffers, as DDP does: before the training step that begins an
            accumulation window, and at the start of validation.
        logging_level: DeepSpeed's own messages below this level of `logging` are dropped.
        shared: options of every strategy; see `RankOptions`.

    Raises:
        ConfigurationError: options that contradict each other, or that the Trainer owns; DeepSpeed missing or too old.
    """

    strategy_name = "paral_zero"

    @takes_rank_options
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        *,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: Offload | Literal["cpu", "nvme"] | None = None,
        offload_parameters: Offload | Literal["cpu", "nvme"] | None = None,
        trust_optimizer: bool = False,
        find_unused_parameters: bool = False,
        overlap_comm: bool | None = None,
        reduce_bucket_numel: int | None = None,
        gather_bucket_numel: int | None = None,
        deepspeed_config: dict[str, Any] | str | Path | None = None,
        broadcast_buffers: bool = True,
        logging_level: int = logging.ERROR,
        **shared: Unpack[RankOptions],
    ) -> None:
        check_installed()
        self._options = options = ZeROOptions(
            stage=stage,
            offload_optimizer=as_offload(offload_optimizer),
            offload_parameters=as_offload(offload_parameters),
            overlap_comm=overlap_comm,
            reduce_bucket_numel=reduce_bucket_numel,
            gather_bucket_numel=gather_bucket_numel,
            users_config=load_config(deepspeed_config),
            trust_optimizer=trust_optimizer,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            logging_level=logging_level,
        )
        self.stage = stage
        self.strategy_name = options.strategy_name
        self.forward_has_collectives = stage == 3
        self.shares_buffers = broadcast_buffers
        self._averaging_obstacle = averaging_obstacle(options)
        # Not DeepSpeedStrategy's constructor: it imports deepspeed, before the accelerator is known.
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            **self._keep_rank_options(shared),
        )
        # What DeepSpeedStrategy reads.
        self.config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        self.remote_device = None
        self._run_state: ZeroRun | None = None
        """From `setup` to `teardown`."""
        self._folders = RunFolders()
        self._undo = ExitStack()
        """Takes back at teardown what `setup_distributed` did in this process."""

    @property
    def precision_plugin(self) -> Precision:
        """What converts, autocasts, and runs backward and step."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # The Trainer makes Lightning's DeepSpeedPrecision for every DeepSpeedStrategy.
        if type(plugin) is DeepSpeedPrecision:
            plugin = ZeROPrecision(plugin.precision)  # type: ignore[arg-type]
        if plugin is not None and not isinstance(plugin, ZeROPrecision):
            raise ConfigurationError(
                f"{type(plugin).__name__} cannot be used under ZeRO. Set Trainer(precision=...) to one of "
                f"{', '.join(PRECISIONS)} instead."
            )
        Strategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

    @property
    def _zero_precision(self) -> ZeROPrecision:
        if not isinstance(self.precision_plugin, ZeROPrecision):
            self.precision_plugin = ZeROPrecision("32-true")
        assert isinstance(self.precision_plugin, ZeROPrecision)
        return self.precision_plugin

    # Process group

    @property
    def root_device(self) -> torch.device:
        """This rank's device; with an index on CPU, too, which DeepSpeed asks for."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    @property
    def dims(self) -> ParallelDims:
        """How the ranks are arranged: what the stage says is sharded over all of them."""
        return ParallelDims(rank=self.global_rank, shard=self.world_size)

    def _check_configured(self) -> None:
        super()._check_configured()
        check_run(self._options, self._zero_precision.precision, self.root_device)
        self._zero_precision.device_type = self.root_device.type

    def setup_environment(self) -> None:
        """Set up the device and join the process group. *Collective* over the world."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Join or make the process group and hand it to DeepSpeed. *Collective* over the world."""
        super().setup_distributed()
        assert self.cluster_environment is not None
        ranks = (self.global_rank, self.world_size, self.local_rank)
        level = self._options.logging_level
        self._undo.enter_context(deepspeed_joined(self.cluster_environment, ranks, level, self.root_device))
        self._undo.enter_context(operators_kept())
        folders = self._folders.make(self._options, self._run, self.global_rank)
        self.config = self._options.deepspeed_config(self._zero_precision.precision, self.root_device, folders)

    # Model wrapping

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Make tensors on the device and in the dtype of the weights."""
        # On CPU without the index: `from_pretrained` takes "cpu:0" for a device it needs `accelerate` for.
        on_cpu = torch.device("cpu") if self.root_device.type == "cpu" else nullcontext()
        with super().tensor_init_context(empty_init), on_cpu:
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Build a model of stage 3 partitioned: each rank keeps only its shard of a parameter that has its values."""
        if self.stage == 3:
            load_async_io(self._options)
        with built_partitioned(self.config, self.lightning_module) if self.stage == 3 else nullcontext():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Make optimizers and engines, the same on all ranks. *Collective* over the world.

        Raises:
            ConfigurationError: ZeRO cannot train the module, or use an optimizer that it returned.
        """
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._restores_after_setup = self.restore_checkpoint_after_setup
        self.accelerator.setup(trainer)
        rejoin(module)
        if fitting:
            sync_batchnorm(module, layer_sync_of(self), self.root_device)
        settings = RunSettings(
            options=self._options,
            config=self.config,
            precision=self._zero_precision,
            dims=self.dims,
            ranks_per_host=self.num_processes,
        )
        run = ZeroRun(module, self.optimizers, self.root_device, self._ended, settings)
        self._run_state = run
        allow_accumulation_schedules(trainer)
        self.model = self.precision_plugin.convert_module(module)
        if fitting:
            self._setup_training(run)
        else:
            self.model = run.evaluate()
        set_forward_redirection(self, run.redirection())
        self.barrier()

    def _setup_training(self, run: ZeroRun) -> None:
        module = self.lightning_module
        assert module is not None
        self.checkpoint_activations()
        check_embeddings(module, self.dims.data_size, "ZeRO")
        run.check_size()
        with full_shapes_shown(module):
            Strategy.setup_optimizers(self, module.trainer)
        check_averaged(self.optimizers, module)
        self.model = run.train(self.optimizers)
        if run.trains:
            buffers = self._buffers_of_fit()
            assert buffers is not None
            buffers.share()
            self._attach_averages(run.weight_shards)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Accumulation is Lightning's."""
        return False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step through the engine.

        Raises:
            ConfigurationError: parameters were unfrozen or added since training began, or used while partitioned.
        """
        assert self._run_state is not None
        self._run_state.check_fixed()
        with explained(partial(explanation, stage=self.stage)):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, in which gradients are reduced. *Collective* over the world.

        Raises:
            ConfigurationError: parameters were unfrozen since training began.
        """
        assert self._run_state is not None
        self._run_state.check_fixed()
        with explained(partial(explanation, stage=self.stage)):
            return super().backward(closure_loss, *args, **kwargs)

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. A folder to which each rank writes its shards: flat ranges of the tensors.

    _default_form = "sharded"

    @property
    def _sharded_state(self) -> ShardedState:
        if self._run_state is not None:
            return self._run_state
        assert self.lightning_module is not None
        return ZeroState(self.lightning_module, self.optimizers, self.root_device, self._ended)

    def _module_is_sharded(self) -> bool:
        # Low-precision weights restored before `setup` would lose digits that the master copies have.
        return self._zero_precision.is_low or super()._module_is_sharded()

    def on_exception(self, exception: BaseException) -> None:
        """Explain what DeepSpeed raised."""
        explain(exception, partial(explanation, stage=self.stage))
        super().on_exception(exception)

    def teardown(self) -> None:
        """Return the module in full, on the host, and leave nothing behind. *Collective*.

        After a failure on several ranks, and where a host has no memory for a module that was built partitioned, the
        parameters of stage 3 stay partitioned; a next run under ZeRO takes them.
        """
        failed = self._is_failing and self.world_size > 1  # other ranks may be anywhere: no collective would end
        self.model = self.lightning_module
        try:
            if self._run_state is not None:
                self._run_state.restore(self._ended, failed=failed)
        finally:
            self._run_state = None
            self._undo.close()
            super().teardown()
            self._folders.leave(self.lightning_module)
