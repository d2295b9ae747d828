"""One fit under DDP: wrap the module, and replace its reducer when the set of trained parameters changes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_paral.compat.lightning.strategies import ddp_options, forget_static_graph, set_ddp_options
from lightning_paral.compat.torch.ddp_reducer import remove_reducer
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.ddp.gradient_reduction import GradientReduction
from lightning_paral.engines.ddp.options import explain_unused
from lightning_paral.engines.ddp.reducer import ReducedParameters
from lightning_paral.errors import UnusedParametersError

log = logging.getLogger(__name__)

_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"


class DDPRun:
    """Wraps the module of a strategy in DDP for one fit. Creating it is *collective* over the world.

    Args:
        strategy: the strategy, whose `model` is wrapped.
        reduction: how gradients are averaged.
        wrap: `DDPStrategy.configure_ddp` of `strategy`, which wraps its `model`.
        dims: the arrangement of the ranks.
        timeout: how long to wait for other ranks.
        undo: a stack of functions that restore the module, closed at the end of the fit.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        reduction: GradientReduction,
        wrap: Callable[[], None],
        dims: ParallelDims,
        timeout: timedelta,
        undo: ExitStack,
    ) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module: LightningModule = strategy.lightning_module
        self._reduction = reduction
        self._wrap = wrap
        self._undo = undo
        self._is_static_graph_known = False
        self._wrap_and_register()
        self._parameters = ReducedParameters(self._module, dims, timeout, undo)

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

    def _wrap_and_register(self) -> None:
        self._wrap()
        self._is_static_graph_known = False
        self._reduction.register(self.model, self._strategy.root_device)

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make DDP find unused parameters if several optimizers take turns. *Collective* over the world if they do."""
        takes_turns = not self._module.automatic_optimization and len(optimizers) > 1
        options = ddp_options(self._strategy)
        if takes_turns and not {"find_unused_parameters", "static_graph"} & options.keys():
            # Each backward pass reaches only some of the parameters, such as those of the generator.
            self._undo.callback(set_ddp_options, self._strategy, options)
            set_ddp_options(self._strategy, options | {"find_unused_parameters": True})
            self._replace_reducer()

    def before_batch(self, batch_idx: int) -> None:
        """Replace the reducer if parameters were frozen or unfrozen since it was created.

        *Collective* in the first step of an epoch, and when the reducer is replaced.

        Raises:
            ConfigurationError: the ranks train different parameters.
            UnusedParametersError: parameters did not contribute to the loss of the previous step. The message names
                them.
        """
        keep_frozen = not self._module.automatic_optimization or bool(self.model.find_unused_parameters)
        if self._parameters.needs_new_reducer(self._module.current_epoch, batch_idx, keep_frozen):
            self._replace_reducer()

    def _replace_reducer(self) -> None:
        old, options = self.model, ddp_options(self._strategy)
        with self._explain_unused_parameters():
            remove_reducer(old)
        # The ranks already hold equal values, or differ on purpose, as they do in post-local SGD.
        set_ddp_options(self._strategy, options | {"init_sync": False})
        self._strategy.model = self._module
        try:
            with self._parameters.for_next_reducer():
                self._wrap_and_register()
        finally:
            set_ddp_options(self._strategy, options)
        self.model.require_forward_param_sync = old.require_forward_param_sync
        forget_static_graph(self._strategy)
        log.info("DDP now reduces the gradients of %d parameters.", len(self._parameters.names))

    @contextmanager
    def accumulating(self, without_reduction: AbstractContextManager[None]) -> Iterator[None]:
        """Accumulate gradients inside the block without reducing them.

        Args:
            without_reduction: `DDPStrategy.block_backward_sync()`, entered for the block.
        """
        # With a static graph, torch's reducer (2.13) asserts that the first backward pass, from which it learns the
        # graph, reduces. One reduction too many changes nothing: the mean of equal values is the value.
        if ddp_options(self._strategy).get("static_graph") and not self._is_static_graph_known:
            yield
            self._is_static_graph_known = True
        else:
            with without_reduction:
                yield

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Run a training step inside the block.

        Raises:
            UnusedParametersError: parameters did not contribute to the loss of the previous step. The message names
                them.
        """
        if not self._module.automatic_optimization:
            # Lightning's forward redirection clears this flag, after which DDP would no longer broadcast buffers.
            self.model.require_forward_param_sync = True
        with self._explain_unused_parameters(), self._parameters.step():
            yield

    @contextmanager
    def _explain_unused_parameters(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if _UNUSED_PARAMETERS not in str(error):
                raise
            names = self._parameters.names
            raise UnusedParametersError(explain_unused(str(error), names, self._strategy.global_rank)) from error

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass of `loss`.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step.
        """
        self._parameters.before_backward(loss)

    def optimizer_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context manager for the step of `optimizer`.

        Raises:
            ConfigurationError: on exit, if the step used gradients of a `loss.backward()` that DDP did not average.
        """
        return self._parameters.optimizer_step(optimizer)

    def before_validation(self) -> None:
        """Keep the first validation step from broadcasting buffers, which a rank without a batch would not join."""
        self.model.require_forward_param_sync = False


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
