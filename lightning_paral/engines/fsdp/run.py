"""One run under FSDP: shard the module, train or evaluate it, and restore it. Its state are shards, DTensors."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from itertools import product, starmap
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.checkpoint.optimizer_state import EndedOptimizers
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.distributed.exchange import gather_ints
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.fsdp import shard
from lightning_paral.engines.fsdp.gradients import DTYPES, AveragedGradients, match_inputs, sharding_policy
from lightning_paral.engines.fsdp.optimizers import check_optimizers, give_shards_to_optimizers
from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.fsdp.refusals import check_user_hooks
from lightning_paral.engines.fsdp.unshard import RootUnshard
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import check_embeddings, check_optimizer_parameters, explain_errors
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.host_memory_check import host_memory_shortage
from lightning_paral.model.requires_grad import TrainedParameters, first_names
from lightning_paral.model.units import Unit, as_tree, choose_units, explain_single_unit
from lightning_paral.model.user_hooks import generate_together

log = logging.getLogger(__name__)

Step = Callable[..., Any]
"""A step of the strategy, such as `training_step`, which calls the step of the module."""


def check_before_fit(module: LightningModule, dims: ParallelDims) -> None:
    """Raise a `ConfigurationError` if `module` or its callbacks cannot be used for training under FSDP."""
    check_user_hooks(module)
    check_embeddings(module, dims.data_size, "FSDP")


class FSDPRun(shard.Sharding):
    """Shards a module, and runs its steps until `FSDPState.restore` restores it.

    Args:
        module: the module, not yet sharded.
        options: the options of the strategy.
        dims: the arrangement of the ranks.
        mesh: the device mesh of the data ranks; the module is sharded over its last dimension.
        device: device of this rank.
        precision: a precision plugin of `lightning_paral.engines.fsdp.gradients`.
        deferred: computes the values of parameters that have none yet, unit by unit; `None` if all have values.
        split: splits layers over the tensor ranks; `None` without these.

    Raises:
        ConfigurationError: the module does not have the units that `options` name.
    """

    def __init__(
        self,
        module: LightningModule,
        options: FSDPOptions,
        dims: ParallelDims,
        mesh: DeviceMesh,
        device: torch.device,
        precision: Precision,
        deferred: DeferredConstruction | None,
        split: shard.SplitParameters | None = None,
    ) -> None:
        super().__init__(module, mesh, split)
        self.module = module
        self.device = device
        self._dims = dims
        self._options = options
        # In manual optimization, one step may call several networks, with backward passes in between. Each is a unit.
        children = not module.automatic_optimization
        units = choose_units(module, options.units, children=children)
        self._has_blocks = bool(units.inner)
        if options.units == "auto" and not children:
            units = shard.leave_small_to_root(units)
        self.units = units
        self._policy = sharding_policy(precision, DTYPES[options.reduce_dtype] if options.reduce_dtype else None)
        self._deferred = deferred
        self._snapshots = [shard.ModuleSnapshot(module.modules())]
        self._trained: TrainedParameters | None = None
        self._accumulates = False

    def print_units(self) -> None:
        """Print the units on rank 0, and warn if there is only the root."""
        replicas = f", {self._dims.replicate} replicas" if self._dims.replicate > 1 else ""
        number = len(self.units.inner) + bool(self.units.root.parameters)
        units = f"{number} unit{'s' if number != 1 else ''}"
        ranks = f"{self._dims.num_ranks} rank{'s' if self._dims.num_ranks != 1 else ''}"
        rank_zero_info(f"FSDP: {units} over {ranks}{replicas}\n{as_tree(self.units)}")
        if not self._has_blocks and self._dims.shard > 1:
            rank_zero_warn(explain_single_unit(self.units))

    def shard(self) -> None:
        """Shard the module, unit by unit. *Collective* over the world.

        Raises:
            ConfigurationError: the trained parameters of a unit have different dtypes.
        """
        generate_together(self.module, self.undo)
        try:
            self._shard_all()
        finally:
            self._snapshots[0].mark_added()
        log.info("module sharded: %s, %d bytes unsharded", type(self.module).__name__, self.num_bytes)

    def _shard_all(self) -> None:
        self.set_units(self.units)
        if self.split is not None:
            self.split.install()
        for module in [module for module in self.module.modules() if isinstance(module, FSDPModule)]:  # the user's
            self._compute_values(list(module.modules()))
            module.set_reshard_after_forward(True, recurse=False)  # over all of its ranks
        for unit in self.units.bottom_up:
            if isinstance(unit.module, FSDPModule):
                self._sharded.append(unit.module)
            elif unit is self.units.root or not any(isinstance(parameter, DTensor) for parameter in unit.parameters):
                self._shard(unit)
        if self._policy.param_dtype is not None and self.device.type == "cpu":
            match_inputs(self.module)
        replicated = shard.unshardable_parameters(self.module)
        group = self._dims.data_group() if self._dims.num_ranks > 1 else None
        self.undo.callback(AveragedGradients(replicated, self._dims.data_size, group).remove)
        shard.move_metrics(self.module, self.device)
        self._let_code_write()
        self.writes.compares_gradients = self._options.accumulate == "sharded"
        self._root = RootUnshard(self._sharded[-1], {unit.module for unit in self.units.inner}, self.writes)

    def _compute_values(self, parts: list[Module]) -> None:
        if self._deferred is not None:
            self._deferred.fill(parts)
            self._snapshots[0].record_values(parts)

    def _shard(self, unit: Unit) -> None:
        module = unit.module
        parts = shard.own_parts(module)
        self._compute_values(parts)
        dims = self._dims
        if dims.data_size * dims.tensor > 1:
            group = dims.data_group() if dims.tensor == 1 else dims.stage_group()
            shard.broadcast_on(self.device, shard.own_tensors(parts), group)
        replicated = set(shard.unshardable_parameters(module))
        for each in replicated:
            each.data = each.data.to(self.device)
        self._prepare(parts, replicated)
        is_mixed = self._policy.param_dtype is not None
        for part in [part for part in parts if is_mixed and shard.stays_fp32(part) and part is not module]:
            if next(part.parameters(), None) is not None:
                self._shard_part(part, replicated)
        self._shard_part(module, replicated)
        self._snapshots[0].free_full(parts)

    def _shard_part(self, part: Module, replicated: set[Any]) -> None:
        on_host = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        self._fully_shard(
            part,
            replicated,
            # Code of a manual step finds the shards, which have the gradients
            reshard_after_forward=self._options.reshard_after_forward if self.module.automatic_optimization else True,
            mp_policy=MixedPrecisionPolicy() if shard.stays_fp32(part) else self._policy,
            offload_policy=on_host if self._options.offload else OffloadPolicy(),
        )

    @property
    def num_bytes(self) -> int:
        """The size of all parameters, unsharded, in bytes."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.module.parameters())

    # Training

    def start_fit(self, timeout: timedelta) -> None:
        """Start watching which parameters are trained. `timeout` limits how long checks wait for other ranks."""
        self._timeout = timeout
        self._trained = TrainedParameters(self.module, self.undo)
        self._known = set(self.module.parameters())
        self.undo.callback(give_shards_to_optimizers(self.writes.shard_of))
        callbacks = [each for each in vars(self.module.trainer)["callbacks"] if isinstance(each, Callback)]
        hooks = product(("on_before_zero_grad", "on_before_backward"), (self.module, *callbacks))
        zeroes_itself = is_overridden("optimizer_zero_grad", self.module)
        self._root.reshards_before_backward = zeroes_itself or any(starmap(is_overridden, hooks))

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check `optimizers`, and make `module.zero_grad()` zero the gradients of their shards as well.

        Raises:
            ConfigurationError: an optimizer cannot update shards, or has parameters whose gradients are not averaged.
        """
        check_optimizers(optimizers, self.module, self.original_parameters(), self.writes.reshard, self.undo)
        if self._dims.data_size > 1:
            check_optimizer_parameters(optimizers, self.module)
        _zero_gradients_of_shards(self.module, optimizers, self.undo)

    @property
    def is_fit(self) -> bool:
        """Whether this run trains the module."""
        return self._trained is not None

    def before_batch(self, batch_idx: int) -> None:
        """Check that all ranks train the same parameters. *Collective* in the first step of an epoch.

        Raises:
            ConfigurationError: the ranks train different parameters, or a parameter is new and not sharded.
        """
        assert self._trained is not None
        if batch_idx < 2:  # steps do the same again and again, and reading the result makes the host wait
            self.writes.check()
        if batch_idx == 1:
            self.check_order()
        if not self._trained.follow(self.module.current_epoch, batch_idx, self._dims, self._timeout):
            return
        by_name = self._trained.by_name
        new = [name for name, p in by_name.items() if p not in self._known and not isinstance(p, DTensor)]
        if new:
            raise ConfigurationError(
                f"These parameters were added to the module after FSDP sharded it: {first_names(new)}. Their gradients "
                "would not be averaged over the ranks. Create them in __init__ or configure_model, or use paral_ddp."
            )

    def training_step(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Return `step(*args, **kwargs)`, run with the root's parameters unsharded. *Collective* over the world."""
        return self.explained(self._root.training_step, step, args, kwargs)

    def evaluation_step(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Return `step(*args, **kwargs)`, run with the root's parameters unsharded. *Collective* over the world."""
        return self.explained(self._root.evaluation_step, step, args, kwargs)

    def check_writes(self) -> None:
        """Raise a `ConfigurationError` if a step has written to weights that were unsharded in 16 bits."""
        self.writes.reshard()  # with reshard_after_forward=False, an evaluation leaves units unsharded
        self.writes.check()
        if self._options.accumulate == "sharded":
            self.writes.check_gradients()
        self.check_order()

    def check_order(self) -> None:
        """Raise a `ConfigurationError` if the ranks have run other units. *Collective* over the world."""
        if self._dims.num_ranks > 1 and len(set(gather_ints(self.writes.order))) > 1:
            raise ConfigurationError(
                "The ranks have run different units, or some had gradients by parameters that others had none by. FSDP "
                "matches what the ranks send by its order, so they have mixed the weights or gradients of different "
                "layers. All ranks must use the same parameters in each step, whatever their samples are: run an "
                "expert without samples on a dummy input and add 0 * its output, turn off LayerDrop, or train with "
                "paral_ddp and find_unused_parameters=True."
            )

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raise a `ConfigurationError` if the parameters of `optimizer` have gradients that are not averaged."""
        if not self.module.automatic_optimization:
            self.writes.check_gradients({each for group in optimizer.param_groups for each in group["params"]})

    @contextmanager
    def accumulating(self, accumulates: bool = True) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside the block, as `FSDPOptions.accumulate` specifies.

        `accumulating(False)` reduces them, also inside of `accumulating()`.
        """
        before, self._accumulates = self._accumulates, accumulates
        self._set_gradient_sync()
        try:
            yield
        finally:
            self._accumulates = before
            self._set_gradient_sync()

    def _set_gradient_sync(self) -> None:
        root: Any = self.module
        root.set_requires_gradient_sync(not self._accumulates or self._options.accumulate == "sharded")

    def explained(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `run(*args, **kwargs)`; errors of torch about sharding become a `ConfigurationError` that explains."""
        try:
            return run(*args, **kwargs)
        except Exception:
            with explain_errors(self.explanation):
                raise


def _zero_gradients_of_shards(module: Module, optimizers: Sequence[Optimizer], undo: ExitStack) -> None:
    """Make `module.zero_grad()` zero the gradients of the optimizers' shards as well, until `undo` is closed.

    Inside a step, the module has unsharded parameters, but the gradients belong to the shards.
    """
    zero_unsharded, zero_shards = module.zero_grad, Optimizer.zero_grad

    @wraps(zero_shards)
    def of_optimizer(*args: Any, **kwargs: Any) -> None:
        with torch.DisableTorchFunctionSubclass():
            zero_shards(*args, **kwargs)

    def of_module(set_to_none: bool = True) -> None:
        zero_unsharded(set_to_none)
        for optimizer in optimizers:  # not its own method: users may count or change its calls
            of_optimizer(optimizer, set_to_none)

    # The class: LightningOptimizer, which manual optimization has, calls its method
    undo.callback(replace_attributes(Optimizer, {"zero_grad": of_optimizer}))
    vars(module)["zero_grad"] = of_module
    undo.callback(vars(module).pop, "zero_grad", None)


class FSDPState(ShardedState):
    """The state of the module of `run`, whose parameters are DTensors.

    Args:
        run: the current run.
        optimizers: the optimizers of the fit; if the run is an evaluation, those of an earlier fit.
        ended: the optimizers of past runs.
        is_failing: whether an exception has ended the run, perhaps in the middle of a step.
        ranks_per_node: number of ranks that share the memory of a node.
    """

    def __init__(
        self,
        run: FSDPRun,
        optimizers: Sequence[Optimizer],
        ended: EndedOptimizers,
        is_failing: bool,
        ranks_per_node: int,
    ) -> None:
        super().__init__(run.module, optimizers, run.device, ended)
        self._run = run
        self._is_failing = is_failing
        self._ranks_per_node = ranks_per_node

    def collect_writes(self) -> None:
        """Reshard all parameters, which a failed step may have left unsharded."""
        self._run.writes.reshard()

    def weight_shards(self) -> WeightShards:
        """Return the local tensors of the parameters. No collective."""
        return FSDPShards(self._run)

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module: its submodules get back their own parameters, with full values, on CPU.

        *Collective* over the world, unless ranks failed. If they did, or if a node lacks memory, parameters stay
        sharded, with a warning.

        Args:
            ended: takes over the states of the optimizers of a fit.
            failed: whether an exception ended a run with several ranks.
        """
        run = self._run
        try:
            obstacle = "the run failed" if failed else host_memory_shortage(run.num_bytes, self._ranks_per_node)
            if obstacle is not None:
                rank_zero_warn(f"{type(run.module).__name__} stays sharded: {obstacle}.")
            originals = run.restore(obstacle)
        finally:
            run.undo.close()  # also if the failure of another rank interrupts this one
        if run.is_fit and originals:
            for optimizer in self.optimizers:
                ended.keep(optimizer, run.module, None, originals)
        if obstacle is None:
            run.module.cpu()


class FSDPShards(WeightShards):
    """The local tensors of the parameters of the sharded module of `run`."""

    def __init__(self, run: FSDPRun) -> None:
        super().__init__(run.module)
        self._run = run

    def prepare(self) -> None:
        """Reshard unsharded parameters, which copies what user code wrote to them to the shards."""
        self._run.writes.reshard()

    def current(self) -> list[Tensor]:
        """Return the local tensors of sharded parameters, and other parameters in full."""
        self.prepare()  # an evaluation with reshard_after_forward=False leaves parameters unsharded
        return super().current()
