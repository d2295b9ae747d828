"""Run the training and evaluation steps of the user on one stage of a pipeline."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.data.parts import LogRecord, join_training_output, num_samples_of, split_batch
from lightning_paral.data.rollback import user_attributes
from lightning_paral.distributed.exchange import check_same_batch
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.attributes import SharedAttributes
from lightning_paral.engines.pipeline.boundaries import Boundaries, ReceivedTensors
from lightning_paral.engines.pipeline.calls import StageDone, UnitCalls
from lightning_paral.engines.pipeline.checks import batch_norms_of, check_batch_norms
from lightning_paral.engines.pipeline.dependencies import Dependencies
from lightning_paral.engines.pipeline.division import Division
from lightning_paral.engines.pipeline.ends import EndCalls
from lightning_paral.engines.pipeline.gradients import StageGradients
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.engines.pipeline.guards import hook_on_parameter
from lightning_paral.engines.pipeline.hidden_attributes import with_attribute
from lightning_paral.engines.pipeline.idle_time import IdleTime
from lightning_paral.engines.pipeline.metrics import share_values
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.pipeline.rehearsal import check_observed, rehearse
from lightning_paral.engines.pipeline.results import StepResults, loss_of
from lightning_paral.engines.pipeline.schedule import passes_of_step
from lightning_paral.engines.pipeline.streams import RandomStreams
from lightning_paral.engines.pipeline.weights import MicroBatchWeights
from lightning_paral.errors import ConfigurationError

Step = Callable[..., Any]
_CHECKED_STEPS = (0, 1, 2, 4)
"""Numbers of optimizer steps after which a training step is rehearsed."""
_NUM_COMPARED = 8


class StageSteps:
    """Runs a step of the user as the passes that a stage computes.

    Args:
        module: the module, which is divided.
        options: the options of the strategy.
        division: the units and ends of the stages.
        dims: the arrangement of the ranks.
        device: the device of this rank.
        groups: the process groups of the run; `None` if there is one stage.
    """

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        division: Division,
        dims: ParallelDims,
        device: torch.device,
        groups: PipelineGroups | None,
    ) -> None:
        self._module = module
        self._options = options
        self._division = division
        self._dims = dims
        self._device = device
        self._groups = groups
        self._own = division.parts[dims.stage]
        self._num_micro_batches = options.num_micro_batches(dims.num_ranks)
        self._is_last_stage = dims.stage == dims.pipeline - 1
        self._idle_time = IdleTime(dims.pipeline, device)
        waiting = self._idle_time.waiting
        self._boundaries = Boundaries(dims, groups, device, waiting)
        self._streams = RandomStreams(module, dims.stage)
        self._calls = UnitCalls(division.units.inner, self._own, self._boundaries, self._streams.enter_units)
        self._results = StepResults(module, dims, groups, device, waiting)
        self._checked_steps: set[int] = set()
        self._first_step = 0
        self._checked_epoch = -1
        self._checked_batches: set[str] = set()

    def install(self, undo: ExitStack) -> None:
        """Replace the calls of the module's units until `undo` is closed."""
        self._calls.install(undo)
        lacking = [end for end in self._division.ends if end.stage(self._dims.pipeline) != self._dims.stage]
        calls = self._calls
        EndCalls(lacking, lambda: calls.next_unit, calls.given_to_end, calls.returned_by_end).install(undo)
        roots = self._module, *vars(self._module.trainer)["callbacks"]
        share_values(roots, self._results, lambda: self._calls.is_in_pass, undo)
        SharedAttributes(self._module, self._results, undo)

    def start_fit(self, gradients: StageGradients) -> None:
        """Prepare for training."""
        self._gradients = gradients
        self._batch_norms = batch_norms_of(self._module) if self._num_micro_batches > 1 else {}

    def finish(self) -> None:
        """Wait until everything is sent and received."""
        self._results.finish()
        self._boundaries.finish()

    # Training

    def train(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `training_step` returns, on all stages, with a loss whose backward pass deposits the gradients.

        *Collective* over the pipeline.
        """
        batch, *others = args
        check_batch_norms(self._batch_norms)
        self._check(step, batch, others, kwargs)
        parts, sizes = split_batch(batch, [self._device] * self._num_micro_batches)
        with self._idle_time.step(len(parts), self._groups):
            return self._train_on(parts, sizes, step, others, kwargs)

    def _check(self, step: Step, batch: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Check the first step, and a few that follow optimizer steps. *Collective* over the pipeline.

        What a step changes may have no effect while parameters have their first values, such as an average of them.
        """
        trainer = self._module.trainer
        if not self._checked_steps:
            self._check_first_batch(batch)
            self._first_step = trainer.global_step
        number = trainer.global_step - self._first_step
        if number in _CHECKED_STEPS and number not in self._checked_steps:
            self._checked_steps.add(number)
            if self._options.check_steps:
                self._rehearse(step, batch, others, kwargs)
        if trainer.current_epoch != self._checked_epoch:
            self._checked_epoch = trainer.current_epoch
            hook = hook_on_parameter(self._module)
            if hook is not None:
                raise ConfigurationError(hook)

    def _train_on(
        self, parts: Sequence[Any], sizes: Sequence[int], step: Step, others: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        records = [LogRecord(size) for size in sizes]
        outputs: list[Any] = [None] * len(parts)
        graphs: dict[int, tuple[Tensor, ReceivedTensors | None]] = {}
        weights = MicroBatchWeights(sizes)
        try:
            trainer = self._module.trainer
            self._gradients.set_aside(begins_window=trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0)
            self._boundaries.expect(len(parts))
            for each in passes_of_step(self._options.schedule, self._dims.stage, self._dims.pipeline, len(parts)):
                number = each.micro_batch
                if each.direction == "backward":
                    self._backward(*graphs.pop(number))
                    continue
                with self._logging_to(records[number]):
                    result = self._forward("training_step", step, (parts[number], *others), kwargs, number)
                if self._is_last_stage:
                    outputs[number] = tree_map_only(Tensor, Tensor.detach, result)
                    result = weights.weighted(number, loss_of(result))
                graphs[number] = result, self._boundaries.take_received()
        finally:
            self._gradients.take()
        known, correction = weights.known()
        joined = join_training_output(outputs, sizes, self._device, known) if self._is_last_stage else None
        if known != sizes:
            for record, output, weight in zip(records, outputs, known, strict=True):
                record.weigh(float(loss_of(output)), weight)
        output, correction = self._results.share((joined, correction), records)
        self._boundaries.finish()
        if isinstance(output, Tensor):
            return self._gradients.attached_to(output, correction)
        output["loss"] = self._gradients.attached_to(output["loss"], correction)
        return output

    def _check_first_batch(self, batch: Any) -> None:
        """Check the first batch, and what hooks before it have done to parameters. *Collective* over the pipeline."""
        self._check_same_batch("training_step", batch)
        check_observed(self._groups, hook_on_parameter(self._module))
        if self._num_micro_batches > 1 and num_samples_of(batch) is None:
            raise ConfigurationError(
                "The first training batch has no tensor with a dimension, so there is nothing to divide into "
                "micro-batches. Return batches whose tensors have the samples in their first dimension, or set "
                "micro_batches=1, with which the stages wait for each other."
            )

    def _check_same_batch(self, step: str, batch: Any) -> None:
        """Check that all stages have the same batch. *Collective* over the pipeline."""
        if self._groups is not None:
            check_same_batch(step, batch, "The stages of the pipeline", self._groups.values)

    def _rehearse(self, step: Step, batch: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
        def forward(part: Any, observer: Dependencies | None) -> Tensor | None:
            result = self._observed_forward("training_step", step, (part, *others), kwargs, observer, LogRecord(1))
            self._boundaries.take_received()  # no backward pass follows
            return loss_of(result) if self._is_last_stage else None

        # Two samples may have equally many tokens by chance, so the first time more of them are compared.
        num_compared = 2 if len(self._checked_steps) > 1 else _NUM_COMPARED
        num_samples = num_compared if self._num_micro_batches > 1 else 1
        rehearse(self._module, batch, forward, self._groups, self._dependencies("training_step"), num_samples)

    def _dependencies(self, step: str) -> Dependencies:
        first = [end.name for end in self._division.ends if end.is_first and self._dims.stage > 0]
        return Dependencies(f"{type(self._module).__name__}.{step}", self._division.units.inner, self._own, first)

    def _observed_forward(
        self,
        name: str,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        observer: Dependencies | None,
        record: LogRecord,
    ) -> Any:
        """Return what `step` returns; `observer` also sees what it logs and keeps."""
        with self._logging_to(record):
            result = self._forward(name, step, args, kwargs, 0, observer)
        if observer is not None:
            attributes = [user_attributes(part) for part in self._module.modules()]
            observer.check_kept(([call.arguments["value"] for call in record.calls], attributes))
        return result

    # Evaluation

    def evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `step`, the step `name` of the module, returns, on all stages. *Collective* over the pipeline."""
        observer, output, failure, record = None, None, None, LogRecord(1)
        if name not in self._checked_batches:
            self._checked_batches.add(name)
            self._check_same_batch(name, args[0])
            if any(end.is_first for end in self._division.ends):
                observer = self._dependencies(name)
        try:
            output = self._observed_forward(name, step, args, kwargs, observer, record)
        except ConfigurationError as error:
            if observer is None:
                raise
            failure = str(error)
        if observer is not None:
            check_observed(self._groups, failure, observer.explain())
        output = self._results.share(output if self._is_last_stage else None, [record])
        self._boundaries.finish()
        return output

    # Passes

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
        if self._dims.pipeline == 1:
            return step(*args, **kwargs)
        with self._calls.forward_pass(observer), self._streams.of_pass(micro_batch), observer or nullcontext():
            try:
                output = step(*args, **kwargs)
                self._calls.check_complete(name)
            except StageDone as done:
                return done.sent
            except Exception as error:
                message = None if observer is None else observer.explain(error)
                message = message or self._calls.explain(name, error)
                if message is None:
                    raise
                if observer is not None:
                    self._boundaries.send_failure(message)
                raise ConfigurationError(message) from error
            if observer is not None:
                observer.check_result(output)
        return output

    def _backward(self, result: Tensor, received: ReceivedTensors | None) -> None:
        self._calls.is_in_backward = self._boundaries.is_in_backward = True
        try:
            with torch.autocast(self._device.type, enabled=False):
                if result.requires_grad:
                    result.backward()  # type: ignore[no-untyped-call]
            if received is not None:
                received.answer_if_unused(self._device)
        finally:
            self._calls.is_in_backward = self._boundaries.is_in_backward = False

    def _logging_to(self, record: LogRecord) -> AbstractContextManager[None]:
        """Record the `self.log` calls inside the block instead of logging."""
        return with_attribute(self._module, "log", record.log)
