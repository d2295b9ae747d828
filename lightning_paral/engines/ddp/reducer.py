"""Which parameters DDP's reducer averages the gradients of: those trained when it is made, which may change later."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.engines.ddp.unannounced_backward import AnnouncedBackward
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, TrainingAgreement, first_names
from lightning_paral.model.user_hooks import has_hook

_MANY_REBUILDS = 10


class ReducedParameters:
    """The parameters of a reducer, and what it takes for its successor to have all that are trained.

    DDP's reducer has the parameters that require a gradient when it is made. The gradients of others are never
    averaged, and it waits in vain for those of a parameter that was frozen since.

    Args:
        module: what DDP wraps.
        timeout: how long other ranks are waited for.
        undo: takes what ends the watch over `requires_grad`.
    """

    def __init__(self, module: LightningModule, timeout: timedelta, undo: ExitStack) -> None:
        self._trained = TrainedParameters(module, undo)
        self._reduced = self._trained.by_name
        self._needed = self._reduced
        self._synchronized = set(self._trained.all_by_name.values())
        self._agreement = TrainingAgreement(self._trained, timeout)
        self._num_rebuilds = 0
        self._announced: AnnouncedBackward | None = None
        self._is_manual = not module.automatic_optimization
        if dist.get_world_size() > 1 and _may_run_backward(module):
            self._announced = AnnouncedBackward(is_manual=self._is_manual)
            self._announced.watch(self._reduced.values())
            undo.callback(self._announced.end)

    @property
    def names(self) -> list[str]:
        """The names of the reducer's parameters, as it numbers them."""
        return list(self._reduced)

    def need_another_reducer(self, epoch: int, batch_idx: int, keep_frozen: bool) -> bool:
        """Whether other parameters are trained in the step that begins. *Collective* in the first step of an epoch.

        Args:
            epoch: of the step.
            batch_idx: of the step.
            keep_frozen: keep parameters that were frozen, for they may only be so for some steps.

        Raises:
            ConfigurationError: the ranks disagree; names the parameters.
        """

        def is_needed() -> bool:
            kept = set(self._reduced.values()) if keep_frozen else set()
            self._needed = {name: p for name, p in self._trained.all_by_name.items() if p.requires_grad or p in kept}
            return bool(self._trained.by_name) and not _are_same(self._needed, self._reduced)

        return self._agreement.update(epoch, batch_idx, is_needed) and is_needed()

    @contextmanager
    def for_next_reducer(self) -> Iterator[None]:
        """Let a DDP that is made inside take the parameters needed. *Collective*: new ones get rank 0's values."""
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
        if self._announced is not None:
            self._announced.watch(p for p in self._reduced.values() if p.requires_grad)
        self._num_rebuilds += 1
        if self._num_rebuilds == _MANY_REBUILDS:
            rank_zero_warn(
                f"The set of trained parameters has changed {_MANY_REBUILDS} times, and DDP's reducer was made anew "
                "each time. Where parameters are frozen for some steps only, find_unused_parameters=True keeps one."
            )

    def before_backward(self, loss: Tensor) -> None:
        """Say that the gradients of `loss` come next.

        Raises:
            ConfigurationError: parameters were unfrozen inside the step.
        """
        self._check_before_backward()
        if self._announced is not None and loss.requires_grad:
            self._announced.expect(loss)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a training step inside the block: under automatic optimization its own backward passes are averaged."""
        announced = None if self._is_manual else self._announced
        with nullcontext() if announced is None else announced.running():
            yield

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Run the step of `optimizer` inside the block.

        Raises:
            ConfigurationError: gradients came by `loss.backward()`, and were not averaged.
        """
        with nullcontext() if self._announced is None else self._announced.optimizer_step(optimizer):
            yield

    def _check_before_backward(self) -> None:
        """Check that no parameter has been unfrozen inside the step: its gradient would not be averaged.

        Raises:
            ConfigurationError: some have; names them.
        """
        if not self._trained.have_changed():
            return
        reduced = set(self._reduced.values())
        late = [name for name, p in self._trained.current_by_name().items() if p.requires_grad and p not in reduced]
        if late:
            raise ConfigurationError(
                f"These parameters came to require a gradient inside training_step, after DDP had arranged for this "
                f"step whose gradients it averages: {first_names(late)}. Unfreeze or add them before the "
                "step: in on_train_epoch_start or on_train_batch_start."
            )


_WHERE_BACKWARD_MAY_RUN = (
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_before_backward"),
    *("on_train_batch_start", "on_train_batch_end", "configure_gradient_clipping", "optimizer_step"),
)


def _may_run_backward(module: LightningModule) -> bool:
    """Whether code of the user's may run backward passes of its own: a hook per parameter is left out otherwise."""
    return not module.automatic_optimization or has_hook(module, _WHERE_BACKWARD_MAY_RUN)


def _are_same(first: dict[str, Parameter], second: dict[str, Parameter]) -> bool:
    return list(map(id, first.values())) == list(map(id, second.values()))
