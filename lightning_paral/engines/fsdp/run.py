"""One run under FSDP: shard the module, train or evaluate it, and restore it. Its state are shards, DTensors."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_paral.checkpoint.optimizer_state import EndedOptimizers
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.compat.torch.fsdp import name_of
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.fsdp.gradients import DTYPES, sharding_policy
from lightning_paral.engines.fsdp.optimizers import check_optimizers, give_shards_to_optimizers
from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.fsdp.refusals import check_user_hooks, explanation
from lightning_paral.engines.fsdp.shard import ShardedModule, SplitParameters, leave_small_to_root
from lightning_paral.engines.fsdp.unshard import UserWrites
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import check_embeddings, check_optimizer_parameters, explain, explain_errors
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.host_memory_check import host_memory_shortage
from lightning_paral.model.requires_grad import TrainedParameters, first_names
from lightning_paral.model.units import as_tree, choose_units, explain_single_unit
from lightning_paral.model.user_hooks import generate_together

log = logging.getLogger(__name__)

Step = Callable[..., Any]
"""A step of the strategy, such as `training_step`, which calls the step of the module."""


def check_before_fit(module: LightningModule, dims: ParallelDims) -> None:
    """Raise a `ConfigurationError` if `module` or its callbacks cannot be used for training under FSDP."""
    check_user_hooks(module)
    check_embeddings(module, dims.data_size, "FSDP")


class FSDPRun:
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
        split: SplitParameters | None = None,
    ) -> None:
        self.module = module
        self.dims = dims
        self.mesh = mesh
        self.device = device
        self._options = options
        # In manual optimization, one step may call several networks, with backward passes in between. Each is a unit.
        children = not module.automatic_optimization
        self.units = choose_units(module, options.units, options.min_params, children=children)
        self._has_blocks = bool(self.units.inner)
        if options.units == "auto" and options.min_params is None and not children:
            self.units = leave_small_to_root(self.units)
        policy = sharding_policy(precision, DTYPES[options.reduce_dtype] if options.reduce_dtype else None)
        self.sharded = ShardedModule(self.units, options, dims, mesh, device, policy, deferred, split)
        self._trained: TrainedParameters | None = None
        self._accumulates = False
        self._num_evaluated = 0
        self._explanation = partial(explanation, units=self.units)

    @property
    def _num_units(self) -> int:
        return len(self.units.inner) + bool(self.units.root.parameters)

    def print_units(self) -> None:
        """Print the units on rank 0, and warn if there is only the root."""
        replicas = f", {self.dims.replicate} replicas" if self.dims.replicate > 1 else ""
        units = f"{self._num_units} unit{'s' if self._num_units != 1 else ''}"
        ranks = f"{self.dims.num_ranks} rank{'s' if self.dims.num_ranks != 1 else ''}"
        rank_zero_info(f"FSDP: {units} over {ranks}{replicas}\n{as_tree(self.units)}")
        if not self._has_blocks and self.dims.shard > 1:
            rank_zero_warn(explain_single_unit(self.units))

    def shard(self) -> None:
        """Shard the module, unit by unit. *Collective* over the world.

        Raises:
            ConfigurationError: the trained parameters of a unit have different dtypes.
        """
        generate_together(self.module, self.sharded.undo)
        self.sharded.shard()
        name, num_bytes = type(self.module).__name__, self.sharded.num_bytes
        log.info("module sharded: %s, %d units, %d bytes unsharded", name, self._num_units, num_bytes)

    # Training

    def start_fit(self, timeout: timedelta) -> None:
        """Start watching which parameters are trained. `timeout` limits how long checks wait for other ranks."""
        self._timeout = timeout
        self._trained = TrainedParameters(self.module, self.sharded.undo)
        self._known = set(self.module.parameters())
        root = self.sharded.root_unshard
        root.watch_backward_passes(self.sharded.undo)
        self.sharded.undo.callback(register_optimizer_step_pre_hook(root.before_optimizer).remove)
        self.sharded.undo.callback(register_optimizer_step_post_hook(root.after_optimizer).remove)
        self.sharded.undo.callback(give_shards_to_optimizers(self.sharded.writes.shards))

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check `optimizers`, and make `module.zero_grad()` zero the gradients of their shards as well.

        Raises:
            ConfigurationError: an optimizer cannot update shards, or has parameters whose gradients are not averaged.
        """
        reshard = self.sharded.writes.reshard
        check_optimizers(optimizers, self.module, self.sharded.original_parameters(), reshard, self.sharded.undo)
        if self.dims.data_size > 1:
            check_optimizer_parameters(optimizers, self.module)
        _zero_gradients_of_shards(self.module, optimizers, self.sharded.writes, self.sharded.undo)

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
        self.sharded.writes.reshard()  # with reshard_after_forward=False, a call in a hook leaves units unsharded
        if batch_idx < 2:  # steps do the same again and again, and reading the result makes the host wait
            self.sharded.writes.check()
        if not self._trained.follow(self.module.current_epoch, batch_idx, self.dims, self._timeout):
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
        assert self._trained is not None
        root = self.sharded.root_unshard
        run = root.training_step if self.module.automatic_optimization else root.manual_step
        return self._explained(run, self._checking_output(step), args, kwargs)

    def evaluation_step(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Return `step(*args, **kwargs)`, run with the root's parameters unsharded. *Collective* over the world."""
        run = self.sharded.root_unshard.evaluation_step
        output = self._explained(run, self._checking_output(step), args, kwargs)
        self._num_evaluated += 1
        if self._num_evaluated <= 2:
            self.sharded.writes.check()
        return output

    def _checking_output(self, step: Step) -> Step:
        """Return `step`, which refuses to return memory of the root's parameters: FSDP2 frees it after the step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            if isinstance(output, Tensor) and output.grad_fn is not None:  # a loss
                return output
            others = {**output, "loss": None} if isinstance(output, dict) else output  # the loss is not read later
            returned = [each for each in tree_leaves(others) if _has_memory(each)]
            memory = self.sharded.writes.memory() if returned else {}
            for each in returned:
                if (param := memory.get(each.untyped_storage().data_ptr())) is not None:
                    raise ConfigurationError(
                        f"A step returned {name_of(param)}, or a view of it, whose memory is freed after the step. "
                        "Return a copy: parameter.clone()."
                    )
            return output

        return run

    def check_writes(self) -> None:
        """Raise a `ConfigurationError` if a step has written to weights that were unsharded in 16 bits."""
        self.sharded.writes.reshard()  # with reshard_after_forward=False, an evaluation leaves units unsharded
        self.sharded.writes.check()

    def backward(self, backward: Callable[..., Tensor], loss: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Return `backward(loss, *args, **kwargs)`, which computes the gradients of the shards. *Collective*."""
        assert self._trained is not None
        result: Tensor = self._explained(backward, loss, *args, **kwargs)
        return result

    def accumulating(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of backward passes inside the block, as `FSDPOptions.accumulate` specifies."""
        return self._with_accumulation(True)

    def reducing(self) -> AbstractContextManager[None]:
        """Reduce gradients in backward passes inside the block, also inside of `accumulating`."""
        return self._with_accumulation(False)

    @contextmanager
    def _with_accumulation(self, accumulates: bool) -> Iterator[None]:
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
        root.set_requires_all_reduce(not self._accumulates)

    # Errors, and the end of the run

    def explain(self, error: BaseException) -> None:
        """Prepend an explanation to the message of `error`, which a hook raised."""
        explain(error, self._explanation)

    def _explained(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception:
            with explain_errors(self._explanation):
                raise


def _has_memory(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not isinstance(value, DTensor)


def _zero_gradients_of_shards(
    module: Module, optimizers: Sequence[Optimizer], writes: UserWrites, undo: ExitStack
) -> None:
    """Make `module.zero_grad()` zero the gradients of the optimizers' shards as well, until `undo` is closed.

    Inside a step, the module has unsharded parameters, but the gradients belong to the shards.
    """
    zero_unsharded, zero_shards = module.zero_grad, Optimizer.zero_grad

    @wraps(zero_shards)
    def of_optimizer(*args: Any, **kwargs: Any) -> None:
        shown = writes.shows_gradients
        writes.show_gradients(False)
        with DisableTorchFunctionSubclass():
            zero_shards(*args, **kwargs)
        writes.show_gradients(shown)

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
        """Reshard parameters after a failed step. Otherwise do nothing, because `Module.state_dict` reshards."""
        if self._is_failing:
            self._run.sharded.reshard()

    def weight_shards(self) -> WeightShards:
        """Return the local tensors of the parameters. No collective."""
        return FSDPShards(self._run.module)

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module: its submodules get back their own parameters, with full values, on CPU.

        *Collective* over the world, unless ranks failed. If they did, or if a node lacks memory, parameters stay
        sharded, with a warning.

        Args:
            ended: takes over the states of the optimizers of a fit.
            failed: whether an exception ended a run with several ranks.
        """
        run, sharded = self._run, self._run.sharded
        if not failed:
            obstacle = host_memory_shortage(sharded.num_bytes, self._ranks_per_node)
        else:
            obstacle = "the run failed"
        if obstacle is not None:
            rank_zero_warn(f"{type(run.module).__name__} stays sharded: {obstacle}.")
        originals = sharded.restore(obstacle)
        if run.is_fit and originals:
            for optimizer in self.optimizers:
                ended.keep(optimizer, run.module, None, originals)
        if obstacle is None:
            run.module.cpu()


class FSDPShards(WeightShards):
    """The local tensors of the parameters of a sharded module."""

    def prepare(self) -> None:
        """Reshard unsharded parameters, which copies what user code wrote to them to the shards."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def current(self) -> list[Tensor]:
        """Return the local tensors of sharded parameters, and other parameters in full."""
        self.prepare()  # an evaluation with reshard_after_forward=False leaves parameters unsharded
        return super().current()
