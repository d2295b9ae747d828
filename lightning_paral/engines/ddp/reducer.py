"""Decide when DDP needs a new reducer, because the set of trained parameters has changed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.ddp.unreduced_backward import UnreducedBackwardGuard
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, TrainingAgreement, first_names
from lightning_paral.model.user_hooks import has_hook

_MANY_REBUILDS = 10


class ReducedParameters:
    """Tracks the parameters of DDP's reducer, and prepares a new reducer when the set of trained parameters changes.

    A reducer has the parameters that require gradients when it is created. It never averages the gradient of a
    parameter that is unfrozen later, and waits forever for the gradient of a parameter that is frozen later.

    Args:
        module: the module that DDP wraps.
        dims: the arrangement of the ranks; the data ranks average their gradients.
        timeout: how long to wait for other ranks.
        undo: a stack; closing it ends the tracking.
    """

    def __init__(self, module: LightningModule, dims: ParallelDims, timeout: timedelta, undo: ExitStack) -> None:
        self._trained = TrainedParameters(module, undo)
        self._reduced = self._trained.by_name
        self._needed = self._reduced
        self._synchronized = set(self._trained.all_by_name.values())
        self._agreement = TrainingAgreement(self._trained, dims, timeout)
        self._num_rebuilds = 0
        self._guard: UnreducedBackwardGuard | None = None
        self._is_manual = not module.automatic_optimization
        if dims.data_size > 1 and _may_run_backward(module):
            self._guard = UnreducedBackwardGuard(is_manual=self._is_manual)
            self._guard.watch(self._reduced.values())
            undo.callback(self._guard.end)

    @property
    def names(self) -> list[str]:
        """The names of the reducer's parameters, in its order."""
        return list(self._reduced)

    def needs_new_reducer(self, epoch: int, batch_idx: int, keep_frozen: bool) -> bool:
        """Return whether the step needs a new reducer. *Collective* in the first step of an epoch.

        Args:
            epoch: the epoch of the step that begins.
            batch_idx: the batch index of the step that begins.
            keep_frozen: whether frozen parameters stay in the reducer, as they may be frozen for some steps only.

        Raises:
            ConfigurationError: the ranks train different parameters, which the message names.
        """

        def is_needed() -> bool:
            kept = set(self._reduced.values()) if keep_frozen else set()
            self._needed = {name: p for name, p in self._trained.all_by_name.items() if p.requires_grad or p in kept}
            return bool(self._trained.by_name) and not _are_same(self._needed, self._reduced)

        return self._agreement.update(epoch, batch_idx, is_needed) and is_needed()

    @contextmanager
    def for_next_reducer(self) -> Iterator[None]:
        """Let the needed parameters require gradients while the block creates a DDP, so that its reducer has them.

        *Collective*: before the block, rank 0 broadcasts the values of new parameters.
        """
        everything = self._trained.all_by_name.values()
        broadcast([p for p in everything if p not in self._synchronized])
        self._synchronized = set(everything)
        frozen = [p for p in self._needed.values() if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        self._reduced = self._needed
        if self._guard is not None:
            self._guard.watch(p for p in self._reduced.values() if p.requires_grad)
        self._num_rebuilds += 1
        if self._num_rebuilds == _MANY_REBUILDS:
            rank_zero_warn(
                f"The set of trained parameters has changed {_MANY_REBUILDS} times, and DDP's reducer was rebuilt "
                "each time. If parameters are frozen for some steps only, find_unused_parameters=True avoids this."
            )

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass of `loss`.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step.
        """
        self._check_before_backward()
        if self._guard is not None and loss.requires_grad:
            self._guard.expect(loss)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a training step inside the block. Under automatic optimization, DDP averages its gradients."""
        guard = None if self._is_manual else self._guard
        with nullcontext() if guard is None else guard.reduced():
            yield

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Run the step of `optimizer` inside the block.

        Raises:
            ConfigurationError: the step uses gradients of a `loss.backward()` that DDP did not average.
        """
        with nullcontext() if self._guard is None else self._guard.optimizer_step(optimizer):
            yield

    def _check_before_backward(self) -> None:
        """Check that no parameter was unfrozen inside the step: its gradient would not be averaged.

        Raises:
            ConfigurationError: some were; the message names them.
        """
        if not self._trained.have_changed():
            return
        reduced = set(self._reduced.values())
        late = [name for name, p in self._trained.current_by_name().items() if p.requires_grad and p not in reduced]
        if late:
            raise ConfigurationError(
                f"These parameters were unfrozen or added inside training_step, after DDP had fixed whose gradients it "
                f"averages in this step: {first_names(late)}. Unfreeze or add them before the "
                "step: in on_train_epoch_start or on_train_batch_start."
            )


_HOOKS_THAT_MAY_RUN_BACKWARD = (
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_before_backward"),
    *("on_train_batch_start", "on_train_batch_end", "configure_gradient_clipping", "optimizer_step"),
)


def _may_run_backward(module: LightningModule) -> bool:
    """Return whether user code may run backward passes itself. If not, parameters need no hooks."""
    return not module.automatic_optimization or has_hook(module, _HOOKS_THAT_MAY_RUN_BACKWARD)


def _are_same(first: dict[str, Parameter], second: dict[str, Parameter]) -> bool:
    return list(map(id, first.values())) == list(map(id, second.values()))
