"""Fully sharded data parallel on FSDP2: parameters, gradients and optimizer state divided among the ranks."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Unpack

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.compat.lightning.loops import evaluate_without_inference_mode
from lightning_paral.compat.lightning.strategies import layer_sync_of, set_device_mesh
from lightning_paral.distributed.mesh import ParallelDims, check_replicate, check_reshard, make_mesh
from lightning_paral.distributed.process_group import check_carries_host_tensors
from lightning_paral.engines.fsdp.averaged_shards import ShardedWeights
from lightning_paral.engines.fsdp.explain_errors import explanation
from lightning_paral.engines.fsdp.guards import check_pruning, check_user_hooks
from lightning_paral.engines.fsdp.optimizers import check_optimizers
from lightning_paral.engines.fsdp.precision import (
    DTYPES,
    ReduceDtype,
    check_precision,
    sharded_precision,
    sharding_policy,
)
from lightning_paral.engines.fsdp.requires_grad import TrainedShards
from lightning_paral.engines.fsdp.restore_room import gather_after_failure, gather_over
from lightning_paral.engines.fsdp.shard import ShardedModule, Sharding, check_module
from lightning_paral.engines.fsdp.zeroing import zero_shards_too
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.batchnorm import sync_batchnorm
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.embeddings import check_embeddings
from lightning_paral.model.explain_errors import Explanation, explain, explained
from lightning_paral.model.foreign_parameters import check_averaged
from lightning_paral.model.pretrained import was_loaded
from lightning_paral.model.units import Units, as_tree, choose_units, explain_single_unit
from lightning_paral.option_types import check_at_least
from lightning_paral.options import RankOptions, UnitChoice, check_unit_choice, takes_rank_options
from lightning_paral.strategies.base import ParalStrategy


class ParalFSDPStrategy(ParalStrategy, ModelParallelStrategy):
    """One process per device, each with a part of every parameter; a unit's parameters are gathered while it computes.

    Selected by name, `Trainer(strategy="paral_fsdp")`, or as an object where options are wanted,
    `Trainer(strategy=ParalFSDPStrategy(units=["Block"]))`. Follows Zhao et al., "PyTorch FSDP: Experiences on Scaling
    Fully Sharded Data Parallel", arXiv:2304.11277, on torch's `fully_shard`. The module needs no change; what it
    shards in `configure_model` by itself is left alone.

    `precision="bf16-mixed"` keeps fp32 shards, gathers in bf16, computes under autocast and reduces in fp32.

    Args:
        units: which submodules are gathered together: `"auto"` finds repeated blocks; or classes, their names, or a
            predicate of a submodule's dotted name and itself. The rest belongs to the root, gathered for a whole step.
        min_params: instead of `units`, the smallest submodules with at least so many parameters.
        replicate: hybrid sharding: so many copies of the model, each sharded over world size / `replicate` ranks.
        reshard_after_forward: let a unit's parameters go between forward and backward. `None`: all but the root's.
            `False`: never, one gathering less for more memory. A number: keep them sharded over so many ranks.
        accumulate: in backward passes that accumulate, reduce gradients at once and hold a part (`"sharded"`), or hold
            them whole and reduce once (`"unsharded"`): memory against traffic. Replicas are averaged once either way.
        prefetch: units gathered ahead, forward and backward. `None`: FSDP2's own choice.
        offload: keep parameters, gradients and optimizer state on the host, and update there.
        reduce_dtype: gradients are reduced as `"fp32"`, `"bf16"` or `"fp16"`. `None`: fp32 under mixed precision, else
            the dtype of the weights.
        broadcast_buffers: give all ranks rank 0's buffers, as DDP does: before the training step that begins an
            accumulation window, and at the start of validation.
        shared: options of every strategy; see `RankOptions`.

    Raises:
        ConfigurationError: options that contradict each other or are out of their range.
    """

    strategy_name = "paral_fsdp"
    forward_has_collectives = True

    @takes_rank_options
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        *,
        units: UnitChoice = "auto",
        min_params: int | None = None,
        replicate: int = 1,
        reshard_after_forward: bool | int | None = None,
        accumulate: Literal["sharded", "unsharded"] = "sharded",
        prefetch: int | None = None,
        offload: bool = False,
        reduce_dtype: ReduceDtype | None = None,
        broadcast_buffers: bool = True,
        **shared: Unpack[RankOptions],
    ) -> None:
        check_unit_choice(units, min_params)
        _check_options(accumulate, prefetch, reduce_dtype)
        if not isinstance(reshard_after_forward, bool):
            check_at_least("ParalFSDPStrategy", "reshard_after_forward", reshard_after_forward, 1)
        super().__init__(**self._take_rank_options(shared))
        if accelerator is not None:
            self.accelerator = accelerator
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.precision_plugin = precision_plugin
        self._units = units
        self._min_params = min_params
        self._replicate = replicate
        self._reshard_after_forward = reshard_after_forward
        self._accumulate = accumulate
        self._prefetch = prefetch
        self._offload = offload
        if offload:
            self.strategy_name = "paral_fsdp_offload"
        self._reduce_dtype = DTYPES[reduce_dtype] if reduce_dtype else None
        self._broadcast_buffers = broadcast_buffers
        self._printed = False
        # Of one run:
        self._deferred: DeferredConstruction | None = None
        self._sharded: ShardedModule | None = None
        self._trained: TrainedShards | None = None
        self._undo = ExitStack()

    @property
    def precision_plugin(self) -> Precision:
        """What converts, autocasts, scales and clips."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        ParallelStrategy.precision_plugin.fset(self, None if plugin is None else sharded_precision(plugin))  # type: ignore[attr-defined]

    # Process group

    def _check_configured(self) -> None:
        super()._check_configured()
        self.precision_plugin = self.precision_plugin  # replaces Lightning's default plugin with ours
        check_precision(self.precision_plugin, self.root_device)
        check_replicate(self._replicate, self.num_nodes * self.num_processes)
        check_reshard(self._reshard_after_forward, self.num_nodes * self.num_processes // self._replicate)

    def setup_environment(self) -> None:
        """Set up the device, join the process group, and arrange its ranks in a mesh. *Collective* over the world."""
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()
        if self._offload:
            check_carries_host_tensors("offload=True")
        assert self.lightning_module is not None
        set_device_mesh(self, self.lightning_module, make_mesh(self.root_device, self.dims.replicate))

    @property
    def dims(self) -> ParallelDims:
        """How the ranks are arranged: `replicate` copies, each sharded over the ranks of its group."""
        num_shards = self.world_size // self._replicate
        return ParallelDims(rank=self.global_rank, replicate=self._replicate, shard=num_shards)

    # Model wrapping

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Make tensors in the dtype of the weights."""
        with self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Build what `configure_model` builds without values; they are drawn unit by unit in `setup`."""
        if self.lightning_module is None:  # `trainer.init_module()`
            yield
            return
        deferred = DeferredConstruction(self.root_device)
        with deferred.recording(self.lightning_module):
            yield
        if isinstance(self.precision_plugin, DoublePrecision | HalfPrecision):  # which converts the module
            deferred.defer_loaded(self.lightning_module)
        self._deferred = None if deferred.is_empty else deferred

    def setup(self, trainer: Trainer) -> None:
        """Shard the module and make its optimizers. *Collective* over the world."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._restores_after_setup = self.restore_checkpoint_after_setup
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        evaluate_without_inference_mode(trainer)
        sharded = self._shard(fitting)
        if fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self.lightning_module, sharded, self.root_device)
            if self.dims.data_size > 1:
                check_averaged(self.optimizers, self.lightning_module)
            zero_shards_too(self.lightning_module, self.optimizers, self._undo)
            self._attach_averages(partial(ShardedWeights, self.lightning_module), self._broadcast_buffers)
        self.setup_precision_plugin()
        self.barrier()

    def _shard(self, fitting: bool) -> ShardedModule:
        module = self.lightning_module
        assert module is not None
        check_module(module)
        if fitting:
            check_user_hooks(module)
            check_embeddings(module, self.dims.data_size, "FSDP")
            check_pruning(vars(module.trainer)["callbacks"])
        if fitting:
            sync_batchnorm(module, layer_sync_of(self), self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        if fitting:
            self.checkpoint_activations()
        # In manual optimization backward passes and steps come between the calls of networks, inside one step.
        manual = not module.automatic_optimization
        units = choose_units(module, self._units, self._min_params, children=manual)
        self._show(units)
        sharding = Sharding(
            mesh=self.device_mesh,
            device=self.root_device,
            policy=sharding_policy(self.precision_plugin, self._reduce_dtype),
            reshard_after_forward=self._reshard_after_forward,
            prefetch=self._prefetch,
            offload=self._offload,
        )
        self._sharded = sharded = ShardedModule(units, sharding, self._deferred)
        sharded.shard()
        self._deferred = None
        if fitting:
            self._buffers = RankZeroBuffers(module, self._broadcast_buffers, self.dims)
            self._trained = TrainedShards(module, self.timeout, self._undo)
        return sharded

    def _show(self, units: Units) -> None:
        if self._printed:
            return
        self._printed = True
        count = len(units.inner) + bool(units.root.parameters)
        replicas = f", {self._replicate} replicas" if self._replicate > 1 else ""
        rank_zero_info(f"FSDP: {count} units over {self.world_size} ranks{replicas}\n{as_tree(units)}")
        if not units.inner and self.dims.shard > 1:
            rank_zero_warn(explain_single_unit(units))

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate in backward passes inside this context, as `accumulate` says."""
        assert self._sharded is not None
        assert self._buffers is not None
        self._sharded.set_gradient_sync(reduce=self._accumulate == "sharded", all_reduce=False)
        try:
            with self._buffers.accumulating():
                yield
        finally:
            self._sharded.set_gradient_sync(reduce=True, all_reduce=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check that all ranks train the same parameters. *Collective* in the first step of an epoch."""
        super().on_train_batch_start(batch, batch_idx)
        assert self._trained is not None
        assert self.lightning_module is not None
        self._trained.before_batch(self.lightning_module.current_epoch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step with the root's parameters gathered."""
        assert self._trained is not None
        assert self._sharded is not None
        assert self.lightning_module is not None
        assert self._buffers is not None
        self._buffers.before_training_step()
        calls = self._sharded.calls
        automatic = self.lightning_module.automatic_optimization
        run = calls.training_step if automatic else calls.manual_step
        self._trained.before_step()
        with explained(self._explanation(in_step=True)):
            output = run(super().training_step, args, kwargs)
        self._trained.carry_over()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation step with the root's parameters gathered."""
        assert self._sharded is not None
        with explained(self._explanation(in_step=True)):
            return self._sharded.calls.evaluation_step(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test step with the root's parameters gathered."""
        assert self._sharded is not None
        with explained(self._explanation(in_step=True)):
            return self._sharded.calls.evaluation_step(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict step with the root's parameters gathered."""
        assert self._sharded is not None
        with explained(self._explanation(in_step=True)):
            return self._sharded.calls.evaluation_step(super().predict_step, args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, at the end of which each rank holds its part of the gradients. *Collective*."""
        assert self._sharded is not None
        assert self._trained is not None
        self._trained.carry_over()
        self._sharded.calls.before_backward(closure_loss)
        with explained(self._explanation(in_step=False)):  # hooks run inside, too
            result = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._sharded.calls.after_backward()
        return result

    def _explanation(self, *, in_step: bool) -> Explanation:
        assert self._sharded is not None
        return partial(explanation, units=self._sharded.units, in_step=in_step)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run `closure`, the hooks and the optimizer, on this rank's parts."""
        assert self._sharded is not None
        self._sharded.calls.before_optimizer()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._sharded.calls.after_optimizer()
        return result

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: `CheckpointMixin`. A folder to which each rank writes its part of the DTensors.

    _default_form = "sharded"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name: tensors of true shapes, of which this rank may hold a part."""
        if self._is_failing and self._sharded is not None:
            self._sharded.reshard()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module its weights, of which each rank reads only what it holds."""
        super().load_model_state_dict(checkpoint, strict)
        self._load_averages(checkpoint, strict)

    def _module_is_sharded(self) -> bool:
        module = self.lightning_module
        assert module is not None
        # What `from_pretrained` has mapped from files takes no memory, until it is loaded into.
        is_mapped = is_overridden("configure_model", module) and any(map(was_loaded, module.parameters()))
        return self._deferred is not None or is_mapped or super()._module_is_sharded()

    def on_exception(self, exception: BaseException) -> None:
        """Explain what FSDP raised."""
        super().on_exception(exception)
        if self._sharded is not None:
            explain(exception, self._explanation(in_step=False))

    def teardown(self) -> None:
        """Give the module back as it was, whole, on the host. *Collective*.

        After a failure of some ranks only, or where a host's memory has no room for it, it stays sharded.
        """
        sharded, self._sharded, self._deferred = self._sharded, None, None
        ended, self._trained = ([] if self._trained is None else self.optimizers), None
        self._undo.close()
        try:
            if sharded is not None:
                mesh = self.device_mesh
                if self._is_failing and self.world_size > 1:
                    gather = gather_after_failure(mesh, self._reachable_ranks())
                else:
                    gather = gather_over(mesh, sharded.num_bytes, self.num_processes)
                if isinstance(gather, str):
                    rank_zero_warn(f"{type(self.lightning_module).__name__} stays sharded: {gather}.")
                originals = sharded.restore(gather)
                for optimizer in ended if originals else ():
                    self._ended.keep(optimizer, sharded.root, None, originals)
                if not isinstance(gather, str):
                    sharded.root.cpu()
        finally:
            set_device_mesh(self, None if sharded is None else self.lightning_module, None)
            super().teardown()
            layer_sync = layer_sync_of(self)
            if self.lightning_module is not None and sharded is not None and layer_sync is not None:
                layer_sync.revert(self.lightning_module)


def _check_options(accumulate: str, prefetch: int | None, reduce_dtype: str | None) -> None:
    if accumulate not in ("sharded", "unsharded"):
        raise ConfigurationError(f"accumulate={accumulate!r} is not known. Choose 'sharded' or 'unsharded'.")
    if prefetch is not None and prefetch < 1:
        raise ConfigurationError(f"prefetch={prefetch!r} has to be at least 1, or None for FSDP2's own choice.")
    if reduce_dtype not in (None, *DTYPES):
        raise ConfigurationError(
            f"reduce_dtype={reduce_dtype!r} is not known. Choose from: {', '.join(map(repr, DTYPES))}."
        )
