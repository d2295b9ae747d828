"""The sharded gradients of one engine: accumulate them over backward passes, average, clip and read them, and step."""

from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.compat.deepspeed import engine as zero_engine
from lightning_paral.compat.deepspeed.optimizer import link_states
from lightning_paral.engines.zero.parameters.writes import Writes
from lightning_paral.engines.zero.training.engine_gradients import EngineGradients
from lightning_paral.engines.zero.training.step_arguments import StepArguments
from lightning_paral.engines.zero.training.usage import Usage
from lightning_paral.engines.zero.training.users_optimizer import UsersOptimizer
from lightning_paral.errors import ConfigurationError, ParalError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_FREED = (
    "under ZeRO they are freed after the step. Call optimizer.zero_grad() before the backward passes of each step, "
    "also in an overridden optimizer_zero_grad, or train with paral_ddp."
)


class GradientsNotReadyError(ParalError, RuntimeError):
    """Sharded gradients were read while they were still being accumulated, or after the step that used them."""


class PartitionedGradients:
    """The gradients of one engine during one fit.

    A *window* is all backward passes whose gradients are added up for one step. Under automatic optimization its last
    pass is known in advance. Under manual optimization only the step shows that the pass before it was the last.

    Args:
        engine: the DeepSpeed engine that reduces the gradients and steps with them.
        users: the user's optimizer.
        writes: the record of what user code writes to parameters.
        usage: the record of which parameters get gradients.
    """

    def __init__(self, engine: "DeepSpeedEngine", users: UsersOptimizer, writes: Writes, usage: Usage) -> None:
        self.engine = engine
        self._users = users
        self._writes = writes
        self._usage = usage
        self._shards = EngineGradients(engine)
        self.stage = self._shards.stage
        self._complete = False
        self._is_closed = False
        self._num_passes = 0
        self._has_linked_states = False
        self._has_old = False
        """Whether one process would still have the gradients of the last step, because they were not zeroed."""
        self._adds_to_old = False
        """Whether one process would have added the gradients of this window to those of the last step."""
        self.clip_by_norm(0.0)
        self.step_arguments = StepArguments(engine.optimizer)
        """Passes the arguments of a step to the optimizer, because `engine.step` takes none."""

    def of(self, optimizer: Any) -> "PartitionedGradients":
        """Return `self`, because there is only one optimizer."""
        return self

    @property
    def per_optimizer(self) -> list["PartitionedGradients"]:
        """The gradients of each optimizer: a list of only this object."""
        return [self]

    def covers(self, parameter: Parameter) -> bool:
        """Return whether the optimizer trains `parameter`."""
        return self._usage.covers(parameter)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients of a backward pass that no step has used yet."""
        return self._num_passes > 0

    @property
    def _optimizer(self) -> Any:
        return self.engine.optimizer

    def end(self) -> None:
        """Stop recording which parameters get gradients."""
        self._usage.end()

    # A window

    def before_backward(self, ends_window: bool, *, by_hand: bool = False) -> None:
        """Prepare for a backward pass.

        Args:
            ends_window: whether this pass is known to be the last of its window.
            by_hand: whether user code zeroes gradients, as it does under manual optimization.

        Raises:
            ConfigurationError: gradients of an earlier step were not zeroed. Under manual optimization: gradients of
                this step have already been read or clipped.
        """
        if self._complete and by_hand:
            self._refuse_more()
        if self._complete or (self._has_old and not by_hand):
            raise ConfigurationError(
                "Gradients of an earlier step were not zeroed before this backward pass. torch would add to them, but "
                f"{_FREED}"
            )
        self.engine.set_gradient_accumulation_boundary(ends_window)
        self._begin_pass(by_hand)
        self._complete = ends_window
        self._usage.begin_pass()

    def undo_empty_pass(self) -> None:
        """Undo `before_backward` if no gradient came, because an overridden `backward` ran no backward pass."""
        if self._num_passes == 1 and not self._usage.has_begun:
            self._num_passes, self._complete = 0, False

    def _begin_pass(self, by_hand: bool) -> None:
        if self._num_passes == 0:
            self._adds_to_old = by_hand and self._has_old
        elif self._num_passes == 1:
            self._shards.zero_stale(self._usage.not_yet_used())  # this pass may add to them
        zero_engine.begin_pass(self._optimizer)
        self._num_passes += 1

    def before_shared_backward(self) -> None:
        """Prepare for a backward pass that may reach parameters of this engine and of other engines."""
        if not self._complete:
            self.engine.set_gradient_accumulation_boundary(False)
        if self._num_passes == 1:
            self._shards.zero_stale(self._usage.not_yet_used())
        zero_engine.begin_shared_pass(self.engine)
        self._usage.begin_pass()
        self._usage.was_reached = False

    def after_shared_backward(self) -> None:
        """Finish the backward pass of `before_shared_backward`. *Collective* if it reached parameters of this engine.

        Raises:
            ConfigurationError: it reached some, but gradients of this step have already been read or clipped.
        """
        zero_engine.end_shared_pass(self.engine)
        self._usage.end_pass()
        if not self._usage.was_reached:
            zero_engine.end_unreached_pass(self.engine)
            return
        if self._complete:
            self._refuse_more()
        zero_engine.end_reached_pass(self.engine)
        if self._num_passes == 0:
            self._adds_to_old = self._has_old
        self._num_passes += 1

    def _refuse_more(self) -> NoReturn:
        raise ConfigurationError(
            "A backward pass ran after gradients of the same step were read, or clipped by value. ZeRO averages "
            "gradients once per step: read and clip them after the last backward pass, just before optimizer.step()."
        )

    def after_backward(self) -> None:
        """Finish a backward pass."""
        self._usage.end_pass()

    def end_window(self) -> None:
        """Average the gradients of a window, unless its last backward pass has done so. *Collective*.

        Raises:
            UnusedParametersError: see `Usage.close_window`.
        """
        if self._is_closed or self._num_passes == 0:
            return
        missed = self._usage.missed_by_last_pass() if self._shards.are_offloaded and self.stage >= 2 else ()
        self._usage.close_window()
        if self._complete and missed:
            zero_engine.end_window_for(self._optimizer, self.stage, [parameter for _, parameter in missed])
        if not self._complete:
            self.engine.set_gradient_accumulation_boundary(True)
            if self.stage >= 2:
                zero_engine.end_window(self._optimizer)
            else:
                self.engine.allreduce_gradients()
        self._shards.zero_stale(self._usage.unused)
        self._complete = self._is_closed = True

    def step(self, loss: Any = None, arguments: dict[str, Any] | None = None) -> None:
        """Update this rank's shards of the parameters, and let all ranks use the new values. *Collective*.

        Args:
            loss: the return value of the closure. The optimizer's `step` gets a closure that returns it.
            arguments: further arguments of the optimizer's `step`, by name.

        Raises:
            ConfigurationError: gradients came from a backward pass that the strategy did not run, or those of the last
                step were not zeroed.
        """
        if self._usage.has_outside_gradients:
            raise ConfigurationError(
                "Gradients came from loss.backward(), which ZeRO does not see: ranks would not average them. Call "
                "self.manual_backward(loss) instead."
            )
        if self._num_passes == 0 and self._has_old:
            raise ConfigurationError(
                "Two steps ran without zero_grad or a backward pass between them. torch would use the same gradients "
                f"again, but {_FREED}"
            )
        if self._num_passes == 0:  # training_step returned None: torch's optimizers would not change anything
            self._users.before_step()
            self._users.after_step()
            self.clip_by_norm(0.0)
            return
        if self._adds_to_old:
            raise ConfigurationError(
                "The gradients of the last step were not zeroed. In one process those of this step would have been "
                "added to them, but ZeRO does not keep them. Call optimizer.zero_grad() after each step, or before its "
                "first self.manual_backward(...)."
            )
        self._users.before_step()
        self._writes.collect()
        self.engine.set_gradient_accumulation_boundary(True)
        with self.step_arguments.use(loss, arguments or {}):
            self.engine.step()
        self._link_states()
        self._writes.drop_outdated(self._usage.covers)
        self._users.after_step()
        if not self.engine.was_step_applied() and not self._optimizer.needs_scaler():
            rank_zero_warn("Gradients were not finite: DeepSpeed skipped this step, so parameters did not change.")
        self.clip_by_norm(0.0)
        self._has_old = True
        self._close()

    def _link_states(self) -> None:
        # DeepSpeed 0.19.8 steps group by group, but links parameters to their states only once, after the first group.
        if self.stage < 3 and not self._has_linked_states and self.engine.was_step_applied():
            link_states(self._optimizer)
            self._has_linked_states = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used yet."""
        self._has_old = False
        if self._num_passes:
            self._shards.drop()
            self._close()

    def _close(self) -> None:
        self._complete = self._is_closed = False
        self._usage.forget_window()
        self._num_passes = 0
        self._adds_to_old = False

    # Clipping

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale gradients in the next step so that their global 2-norm is at most `max_norm`. 0 turns this off."""
        self._shards.clip_by_norm(max_norm)

    def clip_by_value(self, max_value: float) -> None:
        """Clamp each element of the averaged gradients to `[-max_value, max_value]`. *Collective*: ends the window."""
        self.end_window()
        self._shards.wait()
        self._shards.clip_by_value(max_value)

    # Reading

    def norm(self) -> Tensor:
        """Return the global 2-norm of the averaged gradients before clipping by norm: a scalar, fp32. *Collective*."""
        self._check_complete()
        return self._shards.norm()

    def full(self, parameter: Parameter) -> Tensor | None:
        """Return the full averaged gradient of `parameter` in fp32; `None` if it is frozen. *Collective*."""
        self._check_complete()
        return self._shards.full(parameter) if parameter.requires_grad else None

    def _check_complete(self) -> None:
        self.end_window()
        self._shards.wait()
        if not self._complete:
            raise GradientsNotReadyError(
                "There are no gradients now: they exist from the last backward pass of a step to the step itself. "
                "Read them in on_before_optimizer_step or configure_gradient_clipping, or in on_after_backward if the "
                "step comes next."
            )
