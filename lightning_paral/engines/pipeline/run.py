"""One run of a pipeline: divide the module among the stages, then train or evaluate it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_paral.compat.torch.pytree import tree_map_only
from lightning_paral.data.parts.join import join_training_output
from lightning_paral.data.parts.logs import LogRecord
from lightning_paral.data.parts.split import has_samples, split_batch
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.attributes import SharedAttributes
from lightning_paral.engines.pipeline.boundaries import Boundaries, ReceivedTensors
from lightning_paral.engines.pipeline.calls import StageDone, UnitCalls
from lightning_paral.engines.pipeline.checks import batch_norms_of, check_batch_norms
from lightning_paral.engines.pipeline.dependencies import Dependencies
from lightning_paral.engines.pipeline.division import chain_of, divide
from lightning_paral.engines.pipeline.gradients import StageGradients
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.engines.pipeline.hidden_attributes import with_attribute
from lightning_paral.engines.pipeline.idle_time import IdleTime
from lightning_paral.engines.pipeline.metrics import share_values
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.pipeline.parameters import StageParameters, share_buffers
from lightning_paral.engines.pipeline.rehearsal import check_same_batch, rehearse
from lightning_paral.engines.pipeline.results import StepResults, loss_of
from lightning_paral.engines.pipeline.schedule import passes_of_step
from lightning_paral.engines.pipeline.shards import Shards
from lightning_paral.engines.pipeline.streams import RandomStreams
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.units import as_tree

log = logging.getLogger(__name__)

Step = Callable[..., Any]


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
        self._options = options
        self._undo = ExitStack()
        self.units = chain_of(module, options)
        self.parts = divide(self.units, options, dims.pipeline, flops)
        self._flops = flops
        self.num_bytes = sum(unit.num_bytes for unit in (*self.units.inner, self.units.root))
        self._groups = PipelineGroups(dims) if dims.pipeline > 1 else None
        self._shards = shards
        self.parameters = StageParameters(self.units, self.parts, dims, self._groups, device, deferred, shards)
        self._idle_time = IdleTime(dims.pipeline, device)
        waiting = self._idle_time.waiting
        self._boundaries = Boundaries(dims, self._groups, device, waiting)
        self._streams = RandomStreams(module, dims.stage, device)
        self._calls = UnitCalls(self.units.inner, self.parts[dims.stage], self._boundaries, self._streams.enter_units)
        self._results = StepResults(module, dims, self._groups, device, waiting)
        self._is_first_step = True
        self._checked_batches: set[str] = set()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the results of steps."""
        return self.dims.stage == self.dims.pipeline - 1

    def print_units(self) -> None:
        """Print the units on rank 0, and how they are divided."""
        line = f"Pipeline: {' + '.join(str(len(part)) for part in self.parts)} units on {self.dims.pipeline} stages"
        if self._flops is not None:
            shares = [sum(self._flops[number] for number in part) / sum(self._flops) for part in self.parts]
            line += f", with {' + '.join(f'{share:.0%}' for share in shares)} of the operations"
        rank_zero_info(f"{line}\n{as_tree(self.units)}")

    def divide(self) -> None:
        """Divide the module among the stages. *Collective* over the world."""
        self.parameters.divide()
        if self.dims.pipeline > 1:
            self._calls.install(self._undo)
            roots = self.module, *vars(self.module.trainer)["callbacks"]
            share_values(roots, self._results, lambda: self._calls.is_in_pass, self._undo)
            SharedAttributes(self.module, self._results, self._undo)
        log.info("module divided: %s, stage %d of %d", type(self.module).__name__, self.dims.stage, self.dims.pipeline)

    def start_fit(self) -> None:
        """Prepare for training; call this before the optimizers are created."""
        self.is_fit = True
        divides_batches = self._options.num_micro_batches(self.dims.num_ranks) > 1
        self._batch_norms = batch_norms_of(self.module) if divides_batches else {}
        inside, outside = self.parameters.inside, self.parameters.outside
        self.gradients = StageGradients(inside, outside, self.dims, self._groups, self._shards)

    def stop(self) -> None:
        """Restore the calls of the units."""
        self._undo.close()

    def destroy_groups(self) -> None:
        """Destroy the process groups, after everything is sent and received. *Collective* over the pipeline."""
        if self._groups is not None:
            self._results.finish()
            self._boundaries.finish()
            self._groups.destroy()

    # Steps

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Inside the block, make the module's `training_step` run the passes of all micro-batches. *Collective*."""
        with self._replacing("training_step", self._train):
            yield

    @contextmanager
    def evaluation_step(self, name: str) -> Iterator[None]:
        """Inside the block, make the step `name` of the module run on all stages. *Collective*."""
        with self._replacing(name, lambda step, args, kwargs: self._evaluate(name, step, args, kwargs)):
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
        share_buffers(self.units, self.parts, self.dims, self._groups)

    @contextmanager
    def _replacing(self, name: str, run: Callable[[Step, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        """Inside the block, make `module.name(*args, **kwargs)` call `run(step, args, kwargs)` with the user's step."""
        step = getattr(self.module, name)
        with with_attribute(self.module, name, lambda *args, **kwargs: run(step, args, kwargs)):
            yield

    def _unsharded(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shards is None else self._shards.unsharded()

    def _train(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._unsharded():
            return self._train_unsharded(step, args, kwargs)

    def _train_unsharded(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch, *others = args
        check_batch_norms(self._batch_norms)
        if self._is_first_step:
            self._check_first_batch(batch)
            if self._options.check_steps:
                self._rehearse(step, batch, others, kwargs)
        self._is_first_step = False
        parts, sizes = split_batch(batch, [self.device] * self._options.num_micro_batches(self.dims.num_ranks))
        with self._idle_time.step(len(parts), self._groups):
            return self._train_on(parts, sizes, step, others, kwargs)

    def _train_on(
        self, parts: Sequence[Any], sizes: Sequence[int], step: Step, others: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        records = [self._results.record(size) for size in sizes]
        outputs: list[Any] = [None] * len(parts)
        graphs: dict[int, tuple[Tensor, ReceivedTensors | None]] = {}
        self.gradients.set_aside()
        try:
            for each in passes_of_step(self._options.schedule, self.dims.stage, self.dims.pipeline, len(parts)):
                number = each.micro_batch
                if each.direction == "backward":
                    self._backward(*graphs.pop(number))
                    continue
                with self._logging_to(records[number]):
                    result = self._forward("training_step", step, (parts[number], *others), kwargs, number)
                if self.is_last_stage:
                    outputs[number] = tree_map_only(Tensor, Tensor.detach, result)
                    result = loss_of(result) * (sizes[number] / max(1, sum(sizes)))
                graphs[number] = result, self._boundaries.take_received()
        finally:
            self.gradients.take()
        joined = join_training_output(outputs, sizes, self.device) if self.is_last_stage else None
        output = self._results.share(joined, records)
        self._boundaries.finish()
        if isinstance(output, Tensor):
            return self.gradients.attached_to(output)
        output["loss"] = self.gradients.attached_to(output["loss"])
        return output

    def _check_first_batch(self, batch: Any) -> None:
        """Check that batches can be divided, and that all stages have the same one. *Collective* over the pipeline."""
        check_same_batch("training_step", batch, self._groups)
        if self._options.num_micro_batches(self.dims.num_ranks) > 1 and not has_samples(batch):
            raise ConfigurationError(
                "The first training batch has no tensor with a dimension, so there is nothing to divide into "
                "micro-batches. Return batches whose tensors have the samples in their first dimension, or set "
                "micro_batches=1, with which the stages wait for each other."
            )

    def _check_same_batch(self, step: str, batch: Any) -> None:
        """Check in the first call of each step that all stages have the same batch. *Collective* then."""
        if step not in self._checked_batches:
            self._checked_batches.add(step)
            check_same_batch(step, batch, self._groups)

    def _rehearse(self, step: Step, batch: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
        own, divides_batches = self.parts[self.dims.stage], self._options.num_micro_batches(self.dims.num_ranks) > 1

        def forward(part: Any, observer: Dependencies | None) -> Tensor | None:
            with self._logging_to(self._results.record(1)):
                result = self._forward("training_step", step, (part, *others), kwargs, 0, observer)
            return loss_of(result) if self.is_last_stage else None

        rehearse(
            self.module,
            batch,
            forward,
            self.units.inner,
            own,
            self._groups,
            self._streams,
            divides_batches=divides_batches,
        )

    def _evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_same_batch(name, args[0])
        record = self._results.record(1)
        with self._unsharded(), self._logging_to(record):
            output = self._forward(name, step, args, kwargs, 0)
        output = self._results.share(output if self.is_last_stage else None, [record])
        self._boundaries.finish()
        return output

    def _forward(
        self,
        name: str,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batch: int,
        observer: Dependencies | None = None,
    ) -> Any:
        """Return what `step` returns on the last stage; on other stages, what stands for the activations it sent."""
        if self.dims.pipeline == 1:
            return step(*args, **kwargs)
        with self._calls.forward_pass(observer), self._streams.of_pass(micro_batch), observer or nullcontext():
            try:
                output = step(*args, **kwargs)
            except StageDone as done:
                return done.sent
            except ConfigurationError as error:
                if observer is not None:
                    self._boundaries.send_failure(str(error))
                raise
            self._calls.check_complete(name)
            if observer is not None:
                observer.check_result(output)
        return output

    def _backward(self, result: Tensor, received: ReceivedTensors | None) -> None:
        self._calls.is_in_backward = True
        try:
            with torch.autocast(self.device.type, enabled=False):
                if result.requires_grad:
                    result.backward()  # type: ignore[no-untyped-call]
        finally:
            self._calls.is_in_backward = False
        if received is not None:
            received.answer_if_unused(self.device)

    def _logging_to(self, record: LogRecord) -> AbstractContextManager[None]:
        """Record the `self.log` calls inside the block instead of logging."""
        return with_attribute(self.module, "log", record.log)
