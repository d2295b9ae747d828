"""One run of a pipeline: divide the module among the stages, then train or evaluate it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.division import divide
from lightning_paral.engines.pipeline.gradients import StageGradients
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.engines.pipeline.guards import refuse_new_parameters, refuse_registrations
from lightning_paral.engines.pipeline.hidden_attributes import with_attribute
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.pipeline.parameters import StageParameters, share_buffers
from lightning_paral.engines.pipeline.shards import Shards
from lightning_paral.engines.pipeline.steps import StageSteps, Step
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.user_hooks import has_hook

log = logging.getLogger(__name__)

_READING_HOOKS = (
    *("on_before_backward", "on_after_backward", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
)
"""Hooks between the batches of an accumulation window, whose gradients they may read."""


class PipelineRun:
    """Divides a module among stages, and runs its steps until `PipelineState.restore` restores it.

    Args:
        module: the module, not yet divided.
        options: the options of the strategy.
        dims: the arrangement of the ranks.
        device: the device of this rank.
        deferred: computes the values of parameters that have none yet; `None` if all have values.
        flops: for `balance="time"`, the operations of each unit in a training step. `None`: divide by parameters.
        shards: shards the parameters of this stage between steps; `None` if each rank holds its whole stage.

    Raises:
        ConfigurationError: the module has no chain of units, or fewer units than there are stages.
    """

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        dims: ParallelDims,
        device: torch.device,
        deferred: DeferredConstruction | None,
        flops: Sequence[int] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.module = module
        self.dims = dims
        self.device = device
        self.is_fit = False
        self._undo = ExitStack()
        self.division = divide(module, options, dims.pipeline, flops)
        self._groups = PipelineGroups(dims) if dims.pipeline > 1 else None
        self._shards = shards
        self.parameters = StageParameters(self.division, dims, self._groups, device, deferred, shards)
        self._steps = StageSteps(module, options, self.division, dims, device, self._groups)

    def divide(self) -> None:
        """Divide the module among the stages. *Collective* over the world."""
        self.parameters.divide()
        if self._shards is None:  # which have a guard of their own
            self._undo.callback(refuse_registrations(self.module))
        if self.dims.pipeline > 1:
            self._steps.install(self._undo)
        log.info("module divided: %s, stage %d of %d", type(self.module).__name__, self.dims.stage, self.dims.pipeline)

    def start_fit(self) -> None:
        """Prepare for training; call this before the optimizers are created."""
        self.is_fit = True
        inside, outside = self.parameters.inside, self.parameters.outside
        self.gradients = StageGradients(inside, outside, self.dims, self._groups, self.device, self._shards)
        self.gradients.are_read_while_accumulating = has_hook(self.module, _READING_HOOKS)
        self._steps.start_fit(self.gradients)
        self._undo.callback(self.gradients.zero_grad.install())
        self._undo.callback(refuse_new_parameters(self.parameters.own, lambda: self.module.trainer.optimizers))

    def undo_at_end(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the run stops."""
        self._undo.callback(undo)

    def stop(self) -> None:
        """Restore the calls of the units, and what else was replaced for the run."""
        self._undo.close()

    def destroy_groups(self) -> None:
        """Destroy the process groups, after everything is sent and received. *Collective* over the pipeline."""
        if self._groups is not None:
            self._steps.finish()
            self._groups.destroy()

    # Steps

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Inside the block, make the module's `training_step` run the passes of all micro-batches. *Collective*."""
        with self._replacing("training_step", self._steps.train):
            yield

    @contextmanager
    def evaluation_step(self, name: str) -> Iterator[None]:
        """Inside the block, make the step `name` of the module run on all stages. *Collective*."""
        with self._replacing(name, lambda step, args, kwargs: self._steps.evaluate(name, step, args, kwargs)):
            yield

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside the block on each rank."""
        self.gradients.accumulates = True
        try:
            yield
        finally:
            self.gradients.accumulates = False

    def share_buffers(self) -> None:
        """Give all stages the buffers of the stage that computes them. *Collective* over the pipeline."""
        share_buffers(self.division, self.dims, self._groups, self.device)

    @contextmanager
    def _replacing(self, name: str, run: Callable[[Step, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        """Inside the block, make `module.name(*args, **kwargs)` call `run(step, args, kwargs)` with the user's step."""
        step = getattr(self.module, name)

        def run_unsharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with nullcontext() if self._shards is None else self._shards.unsharded():
                return run(step, args, kwargs)

        with with_attribute(self.module, name, lambda *args, **kwargs: run_unsharded(args, kwargs)):
            yield
