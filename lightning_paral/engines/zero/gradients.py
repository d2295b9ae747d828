"""The sharded gradients of a fit: accumulate them over backward passes, average, clip and read them, and step."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.deepspeed import engine as zero_engine
from lightning_paral.engines.zero.backward_order import BackwardOrder
from lightning_paral.engines.zero.optimizer import UsersOptimizer
from lightning_paral.engines.zero.user_access import UserAccess
from lightning_paral.errors import ConfigurationError, ParalError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class GradientsNotReadyError(ParalError, RuntimeError):
    """Sharded gradients were read while they were still being accumulated, or after the step that used them."""


class Gradients:
    """The gradients of one fit.

    A *window* is all backward passes whose gradients are added up for one step. Under automatic optimization its last
    pass is known in advance. Under manual optimization the step ends it.

    Args:
        engine: the DeepSpeed engine that reduces the gradients and steps with them.
        users: the user's optimizer.
        access: copies what user code has written to parameters to the weights that the step updates.
        module: the module.
        trained: the parameters that the optimizer trains, by name.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        users: UsersOptimizer,
        access: UserAccess,
        module: Module,
        trained: Mapping[str, Parameter],
    ) -> None:
        self.engine = engine
        self._users = users
        self._access = access
        self._stage: int = engine.zero_optimization_stage()
        in_order = self._stage > 1 or bool(engine.zero_overlap_comm())
        self._order = BackwardOrder(module, trained, matters=in_order)
        self._num_passes = 0
        self._is_complete = False
        """Whether the gradients of the window are averaged over the ranks, or will be by the running backward pass."""
        self._is_used = False
        """Whether a step has used the gradients of a window that have not been zeroed since."""
        self._max_norm = math.inf
        zero_engine.clip_next_step(self._optimizer, 0.0)

    @property
    def _optimizer(self) -> Any:
        return self.engine.optimizer

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if a parameter has been unfrozen or added."""
        self._order.check_fixed()

    def end(self) -> None:
        """Stop checking backward passes."""
        self._order.end()

    # A window

    def before_backward(self, *, ends_window: bool) -> None:
        """Prepare for a backward pass.

        Args:
            ends_window: whether this pass is known to be the last of its window.

        Raises:
            ConfigurationError: the gradients of the last step were not zeroed, or those of this one were read already.
        """
        if self._is_used:
            raise ConfigurationError(
                "The gradients of the last step were not zeroed before this backward pass. torch would add to them, "
                "but under ZeRO they are freed after the step. Call optimizer.zero_grad() before the backward passes "
                "of each step, also in an overridden optimizer_zero_grad, or train with paral_fsdp."
            )
        if self._is_complete:
            raise ConfigurationError(
                "A backward pass ran after gradients of the same step were read or clipped. ZeRO averages gradients "
                "once per step: read and clip them after the last backward pass, or train with paral_fsdp."
            )
        self.engine.set_gradient_accumulation_boundary(ends_window)
        zero_engine.begin_pass(self._optimizer)
        self._order.begin_pass()
        self._num_passes += 1
        self._is_complete = ends_window

    def after_backward(self) -> None:
        """Check the backward pass.

        Raises:
            UnusedParametersError: see `BackwardOrder.end_pass`.
        """
        self._order.end_pass(self._num_passes - 1)

    def end_window(self) -> None:
        """Average the gradients of the window, unless its last backward pass has done so. *Collective*."""
        if self._is_complete or self._num_passes == 0:
            return
        self._is_complete = True
        self.engine.set_gradient_accumulation_boundary(True)
        if self._stage >= 2:
            zero_engine.end_window(self._optimizer)
        else:
            self.engine.allreduce_gradients()

    def step(self, closure: Callable[[], Any]) -> Any:
        """Return the result of `closure`, after a step with the gradients of its backward pass. *Collective*.

        This rank's shards of the parameters are updated, and all ranks use the new values. Step hooks run around both.

        Raises:
            ConfigurationError: gradients came from a backward pass that the strategy did not run, or those of the last
                step were not zeroed. Or the optimizer has changed.
        """
        return self._users.with_hooks(self._step, closure)

    def _step(self, _: Optimizer, closure: Callable[[], Any]) -> Any:
        result = closure()
        if self._order.has_outside_gradients:
            raise ConfigurationError(
                "Gradients came from loss.backward(), which ZeRO does not see: ranks would not average them. Call "
                "self.manual_backward(loss) instead, or train with paral_fsdp."
            )
        if self._is_used:
            raise ConfigurationError(
                "Two steps ran without zero_grad or a backward pass between them. torch would use the same gradients "
                "again, but under ZeRO they are freed after the step. Train with paral_fsdp."
            )
        self._users.check_fixed()
        if self._num_passes == 0:  # training_step returned None: torch's optimizers would not change anything
            return result
        self._access.collect()
        self.engine.set_gradient_accumulation_boundary(True)
        self._users.step(self.engine.step)
        self._access.remember_kept()
        if not self.engine.was_step_applied() and not self._optimizer.dynamic_loss_scale:
            rank_zero_warn("Gradients were not finite: DeepSpeed skipped this step, so parameters did not change.")
        zero_engine.clip_next_step(self._optimizer, 0.0)
        self._is_used, self._is_complete, self._num_passes, self._max_norm = True, False, 0, math.inf
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new window after a step.

        Raises:
            ConfigurationError: no step has used the gradients of the last backward passes.
        """
        if self._num_passes:
            raise ConfigurationError(
                "zero_grad was called after a backward pass and before the step that uses its gradients. DeepSpeed "
                "cannot drop gradients: decide before the backward pass, or train with paral_fsdp."
            )
        self._is_used = False

    # Clipping and reading

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale the averaged gradients, if there are any, in the next step to a 2-norm of at most `max_norm`."""
        if self._num_passes:
            self.end_window()
            self._max_norm = min(self._max_norm, max_norm)
            zero_engine.clip_next_step(self._optimizer, self._max_norm)

    def norm(self) -> Tensor:
        """Return the global 2-norm of the averaged gradients before clipping by norm: a scalar, fp32. *Collective*."""
        self._check_complete()
        return zero_engine.scaled_norm(self._optimizer, self._stage) / float(self._optimizer.loss_scale)

    def full(self, parameter: Parameter) -> Tensor | None:
        """Return the full averaged gradient of `parameter` in fp32; `None` if it is not trained. *Collective*."""
        from deepspeed.utils import safe_get_full_grad

        self._check_complete()
        gradient = safe_get_full_grad(parameter) if self._order.covers(parameter) else None
        return None if gradient is None else gradient.float() / float(self._optimizer.loss_scale)

    def _check_complete(self) -> None:
        self.end_window()
        if not self._is_complete:
            raise GradientsNotReadyError(
                "There are no gradients now: they exist from the last backward pass of a step to the step itself. "
                "Read them in on_before_optimizer_step or configure_gradient_clipping."
            )
        if self._stage < 3 and self.engine.zero_offload_optimizer() is not None:
            zero_engine.wait_for_copies(self._optimizer)
