"""ZeRO on DeepSpeed: optimizer state (stage 1), gradients (2) and parameters (3) divided among the ranks."""

import logging
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.lightning.strategies import layer_sync_of, set_forward_redirection
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.zero.config import settings
from lightning_paral.engines.zero.config.options import ZeROOptions, as_offload, check_precision
from lightning_paral.engines.zero.engine.accumulation import allow_accumulation_schedules
from lightning_paral.engines.zero.engine.build import (
    build_inference_engine,
    build_training_engine,
    check_parameters,
    destroy,
    trained_of,
)
from lightning_paral.engines.zero.engine.construction import built_partitioned, warn_of_whole
from lightning_paral.engines.zero.engine.explain_errors import explanation
from lightning_paral.engines.zero.engine.precision import ZeROPrecision
from lightning_paral.engines.zero.engine.root_hooks import RootHooksOnce, hooks_of, new_hooks
from lightning_paral.engines.zero.engine.several import build_engines, check_several, drop_gradients_of_others
from lightning_paral.engines.zero.gradients.partitioned import PartitionedGradients
from lightning_paral.engines.zero.offload.checks import check_offload, check_space, load_async_io
from lightning_paral.engines.zero.offload.compiling import operators_kept
from lightning_paral.engines.zero.offload.folders import RunFolders
from lightning_paral.engines.zero.optimizer.accepted import check_kind, engines_optimizer
from lightning_paral.engines.zero.optimizer.twin import UsersOptimizer
from lightning_paral.engines.zero.parameters.masterless import fill, fill_all, held
from lightning_paral.engines.zero.parameters.partition import (
    Belongings,
    count_trained,
    is_partitioned,
    rejoin,
    true_shapes,
)
from lightning_paral.engines.zero.parameters.requires_grad import FixedParameters
from lightning_paral.engines.zero.parameters.writes import Writes
from lightning_paral.engines.zero.runtime.deepspeed import (
    check_accelerator,
    check_installed,
    join_deepspeed,
    leave_deepspeed,
    rank_variables_as_before,
)
from lightning_paral.engines.zero.state.averaged_shards import WeightRuns, averaging_obstacle
from lightning_paral.engines.zero.state.checkpoint_state import ZeroCheckpointState
from lightning_paral.engines.zero.state.full_tensors import ZeroFullTensorReaders
from lightning_paral.engines.zero.state.joint import (
    JointCheckpointState,
    JointGradients,
    join_checkpoint_states,
    join_gradients,
)
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.batchnorm import sync_batchnorm
from lightning_paral.model.buffers import RankZeroBuffers, shared_buffers
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.model.explain_errors import explain, explained
from lightning_paral.model.foreign_parameters import check_averaged
from lightning_paral.model.host_memory_check import host_memory_shortage
from lightning_paral.options import Offload, RankOptions, takes_rank_options
from lightning_paral.strategies.base import ParalStrategy


class ParalZeROStrategy(ZeroFullTensorReaders, ParalStrategy, DeepSpeedStrategy):
    """One process per device, each with its part of optimizer state, gradients and parameters; DeepSpeed's ZeRO.

    Selected by name, `Trainer(strategy="paral_zero2")`, or as an object where options are wanted,
    `Trainer(strategy=ParalZeROStrategy(stage=3, offload_optimizer=Offload("cpu")))`. Follows Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054. Accumulation, clipping,
    precision and hooks are Lightning's, as under `paral_ddp`.

    `precision="bf16-mixed"` and `"16-mixed"` are autocast over fp32 weights, which are gathered, and their gradients
    averaged, in fp32: the numbers of `paral_ddp`. `"bf16-true"` and `"16-true"` keep low-precision weights with fp32
    master copies in the optimizer, and send half as much.

    Args:
        stage: what is divided: 1 the optimizer state, 2 gradients, too, 3 parameters, too.
        offload_optimizer: keep optimizer state and fp32 parameters on the host, and update them there. torch's Adam
            and AdamW are replaced by `DeepSpeedCPUAdam` with the same hyper-parameters. `"cpu"` is short for
            `Offload("cpu")`, `"nvme"` for an `Offload` to the folder named by the environment's PARAL_NVME_PATH.
        offload_parameters: at stage 3, keep parameters on the host or on NVMe while they are not used.
        trust_optimizer: take an optimizer though a trial says that it looks at more than single elements, or could not
            tell. ZeRO shows it flattened parts of parameters.
        find_unused_parameters: let ranks agree in every step which parameters got no gradient, as in
            `DistributedDataParallel`; they stay as they are. Otherwise the first step decides which never get one, and
            gradients that come in another order later are refused: ranks reduce them by position.
        overlap_comm: reduce gradients on a stream of its own while the backward pass runs. `None`: on CUDA, where there
            are several ranks. On CPU there are no streams.
        reduce_bucket_numel: elements of gradients reduced at a time. `None`: 50 million, or all if there are fewer.
        gather_bucket_numel: elements of parameters gathered at a time; at stage 3, ahead of use. `None`: likewise.
        deepspeed_config: anything else of DeepSpeed's configuration, as a dict or a JSON file.
        broadcast_buffers: give all ranks rank 0's buffers, as DDP does: before the training step that begins an
            accumulation window, and at the start of validation.
        logging_level: DeepSpeed's own messages below this level of `logging` are left out.
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
        self.stage = stage
        self.forward_has_collectives = stage == 3
        self._options = ZeROOptions(
            stage=stage,
            offload_optimizer=as_offload(offload_optimizer),
            offload_parameters=as_offload(offload_parameters),
            overlap_comm=overlap_comm,
            reduce_bucket_numel=reduce_bucket_numel,
            gather_bucket_numel=gather_bucket_numel,
            users_config=settings.load_config(deepspeed_config),
        )
        offload = self._options.offload_optimizer
        self.strategy_name = f"paral_zero{stage}" + (f"_{offload.device}" if offload else "").replace("cpu", "offload")
        self._averaging_obstacle = averaging_obstacle(self._options)
        self._trust_optimizer = trust_optimizer
        self._find_unused_parameters = find_unused_parameters
        self._logging_level = logging_level
        self._broadcast_buffers = broadcast_buffers
        # Not DeepSpeedStrategy's constructor: it imports deepspeed, before the accelerator is known.
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            **self._take_rank_options(shared),
        )
        # What DeepSpeedStrategy reads.
        self.config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        self.remote_device = None
        # Of one run:
        self._belongings: Belongings | None = None
        self._gradients: PartitionedGradients | JointGradients | None = None
        self._users_optimizers: list[UsersOptimizer] = []
        self._holdings: ZeroCheckpointState | JointCheckpointState | None = None
        self._writes: Writes | None = None
        self._fixed: FixedParameters | None = None
        self._folders = RunFolders()
        self._undo = ExitStack()

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
                f"{', '.join(settings.PRECISIONS)} instead."
            )
        Strategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

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
        check_accelerator(self.root_device)
        check_precision(self._zero_precision.precision, self.root_device)
        settings.check_precision(self._zero_precision.precision, self._options.users_config)
        self._zero_precision.device_type = self.root_device.type
        check_offload(self._options)

    def setup_environment(self) -> None:
        """Set up the device and join the process group. *Collective* over the world."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Join or make the process group and hand it to DeepSpeed. *Collective* over the world."""
        super().setup_distributed()
        self._undo.enter_context(rank_variables_as_before())
        self._export_rank()
        join_deepspeed(self._logging_level, self.root_device)
        self._undo.callback(leave_deepspeed)
        self._undo.enter_context(operators_kept())
        self.config = self._make_config()

    def _export_rank(self) -> None:
        """Set this rank in the environment, where DeepSpeed reads it."""
        assert self.cluster_environment is not None
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["RANK"] = str(self.global_rank)
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["LOCAL_RANK"] = str(self.local_rank)

    # Model wrapping

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Make tensors on the device and in the dtype of the weights."""
        with super().tensor_init_context(empty_init):
            if self.root_device.type == "cpu":
                # Without the index: `from_pretrained` takes "cpu:0" for a device it needs `accelerate` for.
                with torch.device("cpu"):
                    yield
            else:
                yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Build a model of stage 3 partitioned: each rank keeps its part of a parameter as soon as it has values."""
        if self.stage == 3:
            load_async_io(self._options)
        with built_partitioned(self.config, self.lightning_module) if self.stage == 3 else nullcontext():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Make optimizer and engine, the same on all ranks. *Collective* over the world."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._restores_after_setup = self.restore_checkpoint_after_setup
        self.accelerator.setup(trainer)
        rejoin(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            sync_batchnorm(self.lightning_module, layer_sync_of(self), self.root_device)
        self._belongings = Belongings(self.lightning_module)
        allow_accumulation_schedules(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        hooks = hooks_of(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._setup_training()
        else:
            self._setup_evaluation()
        set_forward_redirection(self, RootHooksOnce(new_hooks(self.lightning_module, hooks)))
        self.barrier()

    def _setup_training(self) -> None:
        module = self.lightning_module
        assert module is not None
        self.checkpoint_activations()
        check_embeddings(module, self.dims.data_size, "ZeRO")
        if self.stage == 3:
            warn_of_whole(module)
        check_space(self._options, count_trained(module.parameters()) * self.num_processes // self.dims.shard)
        users = self._make_optimizers()
        if users is None:
            self._setup_without_optimizer()
            return
        self._users_optimizers = users
        optimizers = [each.optimizer for each in users]
        self.model, engines = self._make_engines(module, users)
        holdings = [ZeroCheckpointState(engine, module, of) for engine, of in zip(engines, users, strict=True)]
        self._holdings = join_checkpoint_states(holdings, optimizers)
        self._writes = Writes(module, self._holdings.adopt, hides_gradients=True)
        gradients = []
        for engine, of, parts in zip(engines, users, holdings, strict=True):
            usage = parts.watch_usage(find_unused=self._find_unused_parameters)
            gradients.append(PartitionedGradients(engine, of, self._writes, usage))
        self._gradients = self._zero_precision.start_fit(join_gradients(gradients, optimizers))
        self.optimizers = optimizers
        found: Any = LightningModule.optimizers(module)
        for of, wrapped, each in zip(users, found if isinstance(found, list) else [found], gradients, strict=True):
            of.hide_state(each.zero_grad)
            vars(wrapped)["zero_grad"] = each.zero_grad  # it inherits torch's
            self._undo.callback(vars(wrapped).pop, "zero_grad", None)
        vars(module)["zero_grad"] = self._gradients.zero_grad
        self._undo.callback(vars(module).pop, "zero_grad", None)
        self._fixed = FixedParameters(module, self._undo)
        self._buffers = RankZeroBuffers(module, self._broadcast_buffers, self.dims)
        self._buffers.share()
        self._attach_averages(partial(WeightRuns, module, self._holdings, self._writes), self._broadcast_buffers)

    def _setup_without_optimizer(self) -> None:
        assert self.lightning_module is not None
        self._setup_evaluation()
        self._buffers = RankZeroBuffers(self.lightning_module, self._broadcast_buffers, self.dims)

    def _setup_evaluation(self) -> None:
        module = self.lightning_module
        assert module is not None
        if self.stage == 3 and next(module.parameters(), None) is not None:
            load_async_io(self._options)
            self.model = build_inference_engine(module, self._sized_config(module), self.root_device)
            self._writes = Writes(module, fill_all, hides_gradients=False)
        else:
            self.model_to_device()
        if self.dims.data_size > 1:
            whole = [parameter for parameter in module.parameters() if not hasattr(parameter, "ds_id")]
            broadcast([*whole, *shared_buffers(module)])

    def _make_optimizers(self) -> list[UsersOptimizer] | None:
        module = self.lightning_module
        assert module is not None
        with true_shapes(module):
            Strategy.setup_optimizers(self, module.trainer)
        optimizers = self.optimizers
        check_averaged(optimizers, module)
        found = check_kind(optimizers, module)
        if found is None:
            return None
        users = [UsersOptimizer(optimizer, module) for optimizer in found]
        if len(users) > 1:
            check_several(users, self._options, self._zero_precision.precision)
        return users

    def _make_engines(self, module: Module, users: list[UsersOptimizer]) -> tuple[Any, list[Any]]:
        offload = self._options.offload_optimizer is not None
        if len(users) > 1:
            for handle in drop_gradients_of_others(module, users):
                self._undo.callback(handle.remove)
            return build_engines(
                module, users, self._sized_config, self.root_device, offload=offload, trust=self._trust_optimizer
            )
        config = self._sized_config(module)
        check_parameters(module, trained_of(module), config)
        optimizer = engines_optimizer(users[0], offload=offload, trust=self._trust_optimizer)
        load_async_io(self._options)
        engine = build_training_engine(module, optimizer, config, self.root_device)
        return engine, [engine]

    def _make_config(self) -> dict[str, Any]:
        zero = self._options.section(pin_memory=self.root_device.type == "cuda")
        for offload, folder in self._folders.make(self._options, self._run, self.global_rank).items():
            zero[offload]["nvme_path"] = str(folder)
        ours = {"zero_optimization": zero} | settings.precision_section(self._zero_precision.precision)
        return settings.complete(ours, self._options.users_config)

    def _sized_config(self, module: Module) -> dict[str, Any]:
        zero = settings.fill_in(
            self.config["zero_optimization"],
            self.stage,
            count_trained(module.parameters()),
            device_type=self.root_device.type,
            num_ranks=self.dims.shard,
        )
        return self.config | {"zero_optimization": zero}

    @property
    def _zero_precision(self) -> ZeROPrecision:
        if not isinstance(self.precision_plugin, ZeROPrecision):
            self.precision_plugin = ZeROPrecision("32-true")
        assert isinstance(self.precision_plugin, ZeROPrecision)
        return self.precision_plugin

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Accumulation is Lightning's."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate in backward passes inside this context; the gradients' own bookkeeping sees to it."""
        # Not `engine.no_sync`: it is refused from stage 2 on, where gradients are divided as soon as they are there.
        assert self._buffers is not None
        with self._buffers.accumulating():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step through the engine.

        Raises:
            ConfigurationError: parameters were unfrozen or added since training began, or used while partitioned.
        """
        assert self._buffers is not None
        self._buffers.before_training_step()
        if self._fixed is not None:
            self._fixed.check()
        with explained(partial(explanation, stage=self.stage)):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, in which gradients are reduced. *Collective* over the world.

        Raises:
            ConfigurationError: parameters were unfrozen since training began.
        """
        if self._fixed is not None:
            self._fixed.check()
        with explained(partial(explanation, stage=self.stage)):
            return super().backward(closure_loss, *args, **kwargs)

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. A folder to which each rank writes the runs of the tensors that it holds.

    _default_form = "sharded"

    def _held(self, parameter: Parameter) -> Tensor:
        return held(parameter) if self._holdings is None else self._holdings.weight(parameter)

    def _fill(self, parameter: Parameter, stored: Tensor) -> bool:
        return fill(parameter, stored) if self._holdings is None else self._holdings.fill(parameter, stored)

    def _module_is_sharded(self) -> bool:
        # Low-precision weights restored before `setup` would lose digits that the master copies have.
        return self._zero_precision.is_low or super()._module_is_sharded()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name: tensors of true shapes, of which this rank may hold a run."""
        if self._writes is not None:
            self._writes.settle()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, reading what is on NVMe once. *Collective* over the world."""
        with nullcontext() if self._holdings is None else self._holdings.in_memory():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module its weights, of which each rank reads only what it holds."""
        super().load_model_state_dict(checkpoint, strict)
        if self._holdings is not None:
            self._holdings.write_masters()
        if self._writes is not None:
            self._writes.accept()
        self._load_averages(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer by parameter, in tensors of true shapes, of which this rank holds a run."""
        if self._holdings is None:  # there is no optimizer, or the run is over
            return super().optimizer_state(optimizer)
        return self._holdings.of(optimizer).optimizer_state()

    def _load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self._holdings is not None:
            self._holdings.of(optimizer).load_optimizer_state(state)

    def on_exception(self, exception: BaseException) -> None:
        """Explain what DeepSpeed raised."""
        explain(exception, partial(explanation, stage=self.stage))
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give the module back whole, on the host, and leave nothing behind. *Collective*.

        After a failure on several ranks, and where a host has no memory for a module that never was whole, the
        parameters of stage 3 stay partitioned; a next run under ZeRO takes them.
        """
        engines: list[Any] = [self.model]
        if self._gradients is not None:
            engines += [each.engine for each in self._gradients.each]
        self.model = self.lightning_module
        failed = self._is_failing and self.world_size > 1  # other ranks may be anywhere: no collective would end
        self._zero_precision.end_fit()
        try:
            if self._writes is not None:
                self._writes.end(settle=not failed)
            for users in self._users_optimizers:
                users.show_state()
            if self._gradients is not None:  # the setup has succeeded
                self._keep_optimizers()
            if self._gradients is not None:
                self._gradients.end()
            if self._belongings is not None:
                self._belongings.restore(gather=self._can_gather(self._belongings, failed=failed))
                for engine in {id(each): each for each in engines if hasattr(each, "destroy")}.values():
                    destroy(engine)
        finally:
            self._belongings = self._gradients = self._holdings = self._writes = self._fixed = None
            self._users_optimizers = []
            self._undo.close()
            super().teardown()
            self._folders.leave(self.lightning_module)

    def _keep_optimizers(self) -> None:
        assert self.lightning_module is not None
        assert self._holdings is not None
        for users in self._users_optimizers:
            optimizer = users.optimizer
            if "offload_optimizer" in self._options.on_nvme:
                self._ended.lose(optimizer, "it was on NVMe")
                continue
            if self._zero_precision.is_low:
                self._ended.lose(optimizer, "it belongs to fp32 master copies of the weights, which went with the run")
                continue
            try:
                state = self._holdings.of(optimizer).optimizer_state()
                self._ended.keep(optimizer, self.lightning_module, state, {})
            except Exception as error:  # raised when the state is asked for; the run has to end here
                self._ended.lose(optimizer, str(error))

    def _can_gather(self, belongings: Belongings, *, failed: bool) -> bool:
        if not failed:
            return self._has_room(belongings)
        assert self.lightning_module is not None
        if any(is_partitioned(parameter) for parameter in self.lightning_module.parameters()):
            warnings.warn(
                f"{type(self.lightning_module).__name__} stays partitioned, as the run failed: its parameters are "
                "empty on every rank, for state_dict() and copies, too. Load a checkpoint into a new module, or fit "
                "this one again under ZeRO stage 3, which takes it as it is.",
                stacklevel=2,
            )
        return False

    def _has_room(self, belongings: Belongings) -> bool:
        if belongings.were_whole:
            return True
        lack: str | None = "its weights lie on NVMe"
        if not belongings.are_on_nvme:
            lack = host_memory_shortage(belongings.num_bytes, self.num_processes)
        if lack is not None:
            rank_zero_warn(f"{type(self.lightning_module).__name__} stays partitioned: {lack}.")
        return lack is None
