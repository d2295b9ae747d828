"""One fit under DDP: wrap the module, replace its reducer when needed, and find gradients that it has not averaged."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_paral.comm import ALL_REDUCE, AllReduce
from lightning_paral.comm.coalescing import broadcast
from lightning_paral.comm.ddp_hook import BucketReducer
from lightning_paral.comm.reduction import WIRE_DTYPES
from lightning_paral.comm.ring import all_reduce_by_size
from lightning_paral.compat.torch.autograd import call_at_end_of_backward
from lightning_paral.compat.torch.process_groups import remove_reducer
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.ddp.options import DDPOptions, explain_unused
from lightning_paral.errors import ConfigurationError, UnusedParametersError
from lightning_paral.model.requires_grad import TrainedParameters, first_names
from lightning_paral.model.user_hooks import has_hook

_requires_grad = attrgetter("requires_grad")
_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"
_HOOKS_THAT_MAY_RUN_BACKWARD = (
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_before_backward"),
    *("on_train_batch_start", "on_train_batch_end", "configure_gradient_clipping", "optimizer_step", "backward"),
)


class DDPRun:
    """Wraps the module of a strategy in DDP for one fit. Creating it is *collective* over the world.

    A reducer has the parameters that require gradients when it is created. It never averages the gradient of a
    parameter that is unfrozen later, and waits forever for the gradient of a parameter that is frozen later. So it is
    replaced when the set of trained parameters has changed.

    Args:
        strategy: the strategy, whose `model` is wrapped.
        options: the options of `ParalDDPStrategy`; they choose what averages the gradients.
        dims: the arrangement of the ranks; the data ranks average their gradients.
        undo: a stack of functions that restore the module, closed at the end of the fit.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        options: DDPOptions,
        dims: ParallelDims,
        undo: ExitStack,
    ) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module: LightningModule = strategy.lightning_module
        self._options, self._dims = options, dims
        self._buckets: BucketReducer | None = None
        self._of_torch = options.for_torch
        self._undo = undo
        self._is_static_graph_known = False
        self._wrap_and_register()
        self._trained = TrainedParameters(self._module, undo)
        self._reduced = self._needed = self._trained.by_name
        self._synchronized = set(self._trained.all_by_name.values())
        self._guard: UnreducedBackwardGuard | None = None
        is_manual = not self._module.automatic_optimization
        # In other hooks the strategy refuses steps with gradients of backward passes that the user's code has run.
        if dims.data_size > 1 and (is_manual or has_hook(self._module, _HOOKS_THAT_MAY_RUN_BACKWARD)):
            self._guard = UnreducedBackwardGuard(is_manual=is_manual)
            self._guard.watch(self._reduced.values())
            undo.callback(self._guard.end)

    @property
    def model(self) -> DistributedDataParallel:
        """The wrapped module, which is a new object each time the reducer is replaced."""
        model = self._strategy.model
        assert isinstance(model, DistributedDataParallel)
        return model

    @property
    def shares_buffers(self) -> bool:
        """Whether rank 0's buffers are broadcast. `False` if the user registered a buffer hook, which replaces this."""
        return self.model.broadcast_buffers and not hasattr(self.model, "buffer_hook")

    def _wrap_and_register(self, **changed: Any) -> None:
        device_ids, given = self._strategy.determine_ddp_device_ids(), self._of_torch | changed
        # https://docs.pytorch.org/docs/stable/notes/cuda.html#use-nn-parallel-distributeddataparallel
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            self._strategy.model = DistributedDataParallel(self._module, device_ids=device_ids, **given)
        self._is_static_graph_known = False
        self._register_reduction()

    # The reducer

    def _register_reduction(self) -> None:
        """Make the new DDP average gradients as the options choose: by a hook, or by one of our all-reduces."""
        options, device = self._options, self._strategy.root_device
        hook, wrapper = options.ddp_comm_hook, options.ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(options.ddp_comm_state, hook if wrapper is None else wrapper(hook))
        all_reduce = _all_reduce_of(options, device)
        if all_reduce is not None and self._buckets is None:
            wire_dtype = None if options.wire_dtype is None else WIRE_DTYPES[options.wire_dtype]
            self._buckets = BucketReducer(all_reduce, self.model.process_group, device, wire_dtype)
            self._undo.callback(self._buckets.shutdown)
        if self._buckets is not None:
            self._buckets.register(self.model)

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make DDP find unused parameters if several optimizers take turns. *Collective* over the world if they do."""
        takes_turns = not self._module.automatic_optimization and len(optimizers) > 1
        if takes_turns and not {"find_unused_parameters", "static_graph"} & self._of_torch.keys():
            # Each backward pass reaches only some of the parameters, such as those of the generator.
            self._of_torch["find_unused_parameters"] = True
            self._replace_reducer()

    def before_batch(self, batch_idx: int, timeout: timedelta) -> None:
        """Replace the reducer if parameters were frozen or unfrozen since it was created.

        *Collective* in the first step of an epoch, and when the reducer is replaced.

        Raises:
            ConfigurationError: the ranks train different parameters.
            UnusedParametersError: parameters did not contribute to the loss of the previous step. The message names
                them.
        """
        epoch = self._module.current_epoch
        if epoch != self._trained.epoch or self._have_changed():
            self._trained.follow(epoch, batch_idx, self._dims, timeout, self._is_outdated)
            if self._is_outdated():
                self._replace_reducer()

    def _have_changed(self) -> bool:
        """Return whether a `requires_grad` has changed since the ranks agreed, or a parameter may be new."""
        trained = self._trained
        return trained.has_new or list(map(_requires_grad, trained.parameters)) != trained.flags

    def _is_outdated(self) -> bool:
        """Find the parameters that a new reducer would have; return whether they are others than those of this one."""
        # Frozen parameters stay if they may be frozen for some steps only.
        keeps_frozen = not self._module.automatic_optimization or self.model.find_unused_parameters
        kept = set(self._reduced.values()) if keeps_frozen else set()
        self._needed = {name: p for name, p in self._trained.all_by_name.items() if p.requires_grad or p in kept}
        return bool(self._trained.by_name) and _ids(self._needed) != _ids(self._reduced)

    def _replace_reducer(self) -> None:
        """Replace the reducer by one that has the needed parameters. *Collective* over the world."""
        old = self.model
        if self._options.static_graph and not self._module.automatic_optimization:
            raise ConfigurationError(
                "Parameters were frozen or unfrozen in manual optimization, but static_graph=True promises that all "
                "steps use the same ones. Leave out static_graph=True."
            )
        try:
            remove_reducer(old)
        except RuntimeError as error:
            self._explain_unused(error)
            raise
        parameters = self._trained.all_by_name.values()
        broadcast([p for p in parameters if p not in self._synchronized])
        self._synchronized = set(parameters)
        frozen = [p for p in self._needed.values() if not p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)  # until the reducer has them
            # The ranks already hold equal values, or differ on purpose, as they do in post-local SGD.
            self._wrap_and_register(init_sync=False)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        self._reduced = self._needed
        if self._guard is not None:
            self._guard.watch(p for p in self._reduced.values() if p.requires_grad)
        self.model.require_forward_param_sync = old.require_forward_param_sync

    # A step

    @contextmanager
    def accumulating(self, without_reduction: AbstractContextManager[None]) -> Iterator[None]:
        """Accumulate gradients inside the block without reducing them.

        Args:
            without_reduction: `DDPStrategy.block_backward_sync()`, entered for the block.
        """
        # With a static graph, torch's reducer (2.13) asserts that the first backward pass, from which it learns the
        # graph, reduces. One reduction too many changes nothing: the mean of equal values is the value.
        if self._options.static_graph and not self._is_static_graph_known:
            yield
            self._is_static_graph_known = True
        else:
            with without_reduction:
                yield

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a training step. Under automatic optimization, DDP averages its gradients.

        Args:
            step: the `training_step` of Lightning's strategy.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            UnusedParametersError: parameters did not contribute to the loss of the previous step. The message names
                them.
        """
        is_manual = not self._module.automatic_optimization
        if is_manual:
            # Lightning's forward redirection clears this flag, after which DDP would no longer broadcast buffers.
            self.model.require_forward_param_sync = True
        try:
            with nullcontext() if self._guard is None or is_manual else self._guard.reduced():
                return step(*args, **kwargs)
        except RuntimeError as error:
            self._explain_unused(error)
            raise

    def _explain_unused(self, error: RuntimeError) -> None:
        """Raise an `UnusedParametersError` if `error` is DDP's about unused parameters."""
        if _UNUSED_PARAMETERS in str(error):
            names = [name for name in self._reduced if name not in self.model.parameters_to_ignore]
            explained = explain_unused(str(error), names, self._strategy.global_rank)
            raise UnusedParametersError(explained) from error

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass of `loss`.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step. Their gradients would not be averaged.
        """
        if self._have_changed():
            reduced = set(self._reduced.values())
            late = [name for name, p in self._trained.current_by_name().items() if p.requires_grad and p not in reduced]
            if late:
                raise ConfigurationError(
                    "These parameters were unfrozen or added inside training_step, after DDP had fixed whose gradients "
                    f"it averages in this step: {first_names(late)}. Unfreeze or add them before the step: in "
                    "on_train_epoch_start or on_train_batch_start."
                )
        if self._guard is not None and loss.requires_grad:
            self._guard.expect(loss)

    def optimizer_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context manager for the step of `optimizer`.

        Raises:
            ConfigurationError: on exit, if the step used gradients of a `loss.backward()` that DDP did not average.
        """
        return nullcontext() if self._guard is None else self._guard.optimizer_step(optimizer)

    def before_validation(self) -> None:
        """Keep the first validation step from broadcasting buffers, which a rank without a batch would not join."""
        self.model.require_forward_param_sync = False


def _all_reduce_of(options: DDPOptions, device: torch.device) -> AllReduce | None:
    """Return the function of ours that averages gradients; `None` if DDP's own reducer or the hook does."""
    is_narrow = options.wire_dtype is not None
    if options.all_reduce == "auto" and is_narrow and device.type == "cpu":
        return all_reduce_by_size
    if options.all_reduce in ("auto", "native"):
        return ALL_REDUCE["native"] if is_narrow else None
    return ALL_REDUCE[options.all_reduce]


def _ids(parameters: dict[str, Parameter]) -> list[int]:
    return list(map(id, parameters.values()))


def averaged_closure(optimizer: Optimizer, closure: Callable[[], Any], reduce: Callable[[Any], Any]) -> Any:
    """Return `closure`, or for LBFGS a closure that returns the mean loss of all ranks.

    LBFGS uses the loss to choose its step size and to stop, so different losses would make the ranks diverge.

    Args:
        optimizer: the optimizer, whose step calls the closure.
        closure: returns the loss of this rank.
        reduce: averages a tensor over the ranks, in place. *Collective*.
    """
    if not isinstance(optimizer, LBFGS):
        return closure

    def averaged() -> Any:
        loss = closure()
        return reduce(loss.detach().clone()) if isinstance(loss, Tensor) else loss

    return averaged


class UnreducedBackwardGuard:
    """Rejects optimizer steps that use gradients of a `loss.backward()` that DDP did not average.

    Args:
        is_manual: whether the module uses manual optimization.
    """

    def __init__(self, *, is_manual: bool) -> None:
        self._is_manual = is_manual
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._is_reduced = self._in_strategy_step = False
        self._unreduced: set[Tensor] = set()
        # Under automatic optimization the strategy refuses other steps than its own.
        self._step_hooks = [register_optimizer_step_pre_hook(self._check_step)] if is_manual else []

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Watch for unreduced gradients of `parameters`, all of which must require gradients at this time."""
        for parameter in parameters:
            if parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle

    def _note_gradient(self, parameter: Tensor) -> None:
        if not self._is_reduced:
            self._unreduced.add(parameter)

    def expect(self, loss: Tensor) -> None:
        """Treat the backward pass of `loss` as averaged, but not those that hooks run before and after it."""
        loss.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        self._drop_zeroed()
        self._is_reduced = True
        call_at_end_of_backward(self._end)

    def _end(self) -> None:
        self._is_reduced = False

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Treat backward passes inside the block as averaged."""
        self._drop_zeroed()
        before, self._is_reduced = self._is_reduced, True
        try:
            yield
        finally:
            self._is_reduced = before

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Treat the step of `optimizer` inside the block as the strategy's own.

        Raises:
            ConfigurationError: the step, or its closure, used gradients that were not averaged.
        """
        self._in_strategy_step = True
        try:
            yield
        finally:
            self._in_strategy_step = False
        if not self._is_manual:  # the closure, which zeroes gradients, has run
            self._check_gradients(optimizer)

    def _drop_zeroed(self) -> None:
        if self._unreduced:
            self._unreduced = {p for p in self._unreduced if p.grad is not None and bool(p.grad.any())}

    def _check_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (
            isinstance(optimizer, LBFGS)
            and not self._in_strategy_step
            and _parameters_of(optimizer) & self._handles.keys()
        ):
            raise ConfigurationError(
                "LBFGS.step was not called through the strategy, so each rank would choose its step size by its own "
                "loss. Take the optimizer from self.optimizers()."
            )
        self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        self._drop_zeroed()
        if self._unreduced and _parameters_of(optimizer) & self._unreduced:
            raise ConfigurationError(
                "Some gradients come from loss.backward(), which bypasses DDP: the ranks did not average them. Under "
                "manual optimization call self.manual_backward(loss) instead; in hooks use torch.autograd.grad for "
                "gradients that the optimizer does not use."
            )

    def end(self) -> None:
        """Remove all hooks."""
        for handle in (*self._step_hooks, *self._handles.values()):
            handle.remove()
        self._handles = {}


def _parameters_of(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}
