"""The sharded gradients of a fit: check, accumulate, average, clip and read them, and step."""

import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.deepspeed import optimizer as zero_optimizer
from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.engines.zero.optimizer import UsersOptimizer
from lightning_paral.engines.zero.user_access import UserAccess
from lightning_paral.errors import ConfigurationError, ParalError, UnusedParametersError
from lightning_paral.model.requires_grad import TrainedParameters, first_names

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_INSTEAD = "Make the loss depend on all of them in every backward pass, or train with paral_fsdp."


class BackwardOrder:
    """Records the order in which trained parameters get gradients, from construction to `end`.

    Args:
        module: the module when the run begins.
        trained: the parameters that the optimizer trains, by name.
        matters: whether gradients are reduced in the order in which they come. Otherwise only missing ones are refused.
    """

    def __init__(self, module: Module, trained: Mapping[str, Parameter], *, matters: bool) -> None:
        self._matters = matters
        self._names = list(trained)
        self._numbers = {id(parameter): number for number, parameter in enumerate(trained.values())}
        self._undo = ExitStack()
        self._tracked = TrainedParameters(module, self._undo)
        self._at_start = self._tracked.by_name
        self._order: list[int] = []
        self._agreed: list[list[int]] = []
        """For each backward pass of a window, the order in the first window that had as many passes."""
        self._is_running = False
        self.has_outside_gradients = False
        """Whether parameters got gradients in a backward pass that the strategy did not run."""
        for parameter in trained.values():
            handle = parameter.register_post_accumulate_grad_hook(self._record)  # type: ignore[no-untyped-call]
            self._undo.callback(handle.remove)

    def covers(self, parameter: Parameter) -> bool:
        """Return whether the optimizer trains `parameter`."""
        return id(parameter) in self._numbers

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if a parameter that requires a gradient did not when the run began."""
        with DisableTorchFunctionSubclass():  # reading attributes of partitioned parameters is slow otherwise
            if not self._tracked.have_changed():
                return
            now = self._tracked.current_by_name()
            self._tracked.update()
        added = [name for name, p in now.items() if p.requires_grad and self._at_start.get(name) is not p]
        if added:
            raise ConfigurationError(
                "These parameters require a gradient now, but were frozen or not in the module when the run began: "
                f"{first_names(added)}. ZeRO shards only what is trained from the beginning. Train with paral_fsdp or "
                "paral_ddp."
            )

    def _record(self, parameter: Tensor) -> None:
        if self._is_running:
            self._order.append(self._numbers[id(parameter)])
        else:
            self.has_outside_gradients = True

    def begin_pass(self) -> None:
        """Begin to record a backward pass."""
        self._is_running, self._order = True, []

    def end_pass(self, number: int) -> None:
        """Check the backward pass, the one with this `number` in its window. *Collective* if no window had so many.

        Raises:
            UnusedParametersError: a trained parameter got no gradient, the ranks differ, or the order has changed.
        """
        self._is_running = False
        if not self._matters:
            self._order.sort()
        if number < len(self._agreed):
            if self._order != self._agreed[number]:
                self._refuse()
            return
        if not _equal_on_all_ranks(self._order) or len(set(self._order)) < len(self._names):
            self._refuse()
        self._agreed.append(self._order)

    def _refuse(self) -> NoReturn:
        got = set(self._order)
        missing = [name for number, name in enumerate(self._names) if number not in got]
        if missing:
            raise UnusedParametersError(
                f"These parameters got no gradient in a backward pass: {first_names(missing)}. torch's optimizers skip "
                "them, but ZeRO steps on flat tensors and would change them. If they are never used, freeze them with "
                f"requires_grad_(False) before the run, not in it. {_INSTEAD}"
            )
        raise UnusedParametersError(
            "Gradients came in a different order than on other ranks, or than in an earlier step. ZeRO matches the "
            f"gradients of the ranks by position, so it would add up those of different parameters. {_INSTEAD}"
        )

    def end(self) -> None:
        """Stop recording."""
        self._undo.close()


def _equal_on_all_ranks(order: list[int]) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    from deepspeed import comm

    digest = zlib.crc32(repr(order).encode())
    # In host memory, because reading it from a GPU would wait for all work that is queued there.
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    comm.all_reduce(bounds, op=comm.ReduceOp.MAX)  # waits for what is still sent
    return int(bounds[0]) == -int(bounds[1])


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
        zero_optimizer.clip_next_step(self._optimizer, 0.0)

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
        zero_optimizer.begin_pass(self._optimizer)
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
            zero_optimizer.end_window(self._optimizer)
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
        if not self.engine.was_step_applied() and not self._optimizer.dynamic_loss_scale:
            rank_zero_warn("Gradients were not finite: DeepSpeed skipped this step, so parameters did not change.")
        zero_optimizer.clip_next_step(self._optimizer, 0.0)
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
            zero_optimizer.clip_next_step(self._optimizer, self._max_norm)

    def norm(self) -> Tensor:
        """Return the global 2-norm of the averaged gradients before clipping by norm: a scalar, fp32. *Collective*."""
        self._check_complete()
        return zero_optimizer.scaled_norm(self._optimizer, self._stage) / float(self._optimizer.loss_scale)

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
            zero_optimizer.wait_for_copies(self._optimizer)
