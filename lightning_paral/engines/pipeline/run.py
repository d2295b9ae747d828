"""One run of a pipeline: divide the module among the stages, train or evaluate it, and restore it."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.optimizer_state import EndedOptimizers
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.data.parts import LogRecord, join_training_output, num_samples_of, split_batch
from lightning_paral.data.rollback import rollback_attributes
from lightning_paral.distributed.exchange import check_same_batch
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.calls import (
    Boundaries,
    Pipeline,
    Received,
    StageDone,
    UnitCalls,
    replace_end_calls,
)
from lightning_paral.engines.pipeline.checks import StepCheck, check_batch_norms, check_parameter_hooks
from lightning_paral.engines.pipeline.division import divide
from lightning_paral.engines.pipeline.gradients import StageGradients
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.pipeline.parameters import Shards, StageParameters, share_buffers
from lightning_paral.engines.pipeline.results import SharedAttributes, StepResults, loss_of
from lightning_paral.engines.pipeline.schedule import MicroBatchWeights, RandomStreams, idle_fraction, passes_of_step
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.host_memory_check import host_memory_shortage

log = logging.getLogger(__name__)

Step = Callable[..., Any]
CheckSplit = Callable[[Any, Callable[[Any], Tensor | None]], None]
"""Called with the first batch, and with what runs the passes of a batch that is not divided."""
_CHECKED_STEPS = (0, 1, 2, 4)
"""Numbers of optimizer steps after which a training step is checked."""
_NUM_COMPARED = 8


class PipelineRun:
    """Divides a module among stages, and runs its steps until `PipelineState.restore` restores it.

    Args:
        module: the module, not yet divided.
        options: the options of the strategy.
        dims: the arrangement of the ranks.
        device: the device of this rank.
        deferred: computes the values of parameters that have none yet; `None` if all have values.
        shards: shards the parameters of this stage between steps; `None` if each rank holds its whole stage.
        in_full: returns what a unit or a step returns, with ordinary tensors in place of those that are split over
            tensor ranks.

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
        shards: Shards | None = None,
        in_full: Callable[[Any], Any] = lambda output: output,
    ) -> None:
        self.module = module
        self.dims = dims
        self.device = device
        self.is_fit = False
        self.division = divide(module, options, dims.pipeline)
        self._options = options
        self._num_micro_batches = options.num_micro_batches(dims.num_ranks)
        self._undo = ExitStack()
        self._shards = shards
        self._in_full = in_full
        self.check_split: CheckSplit | None = None
        """Checks in the first training step that splitting layers over tensor ranks changes nothing."""
        parts = self.division.parts_of(dims.stage)
        self._parts = parts
        is_ring = len(self.division.parts) > dims.pipeline
        self._pipeline = pipeline = Pipeline(dims, device, is_ring=is_ring)
        self.parameters = StageParameters(self.division, pipeline, deferred, shards)
        units = self.division.units.inner
        self._boundaries = Boundaries(pipeline, parts, len(self.division.parts))
        self._streams = RandomStreams(module, parts)
        own = {part: self.division.parts[part] for part in parts}
        self._calls = UnitCalls(units, own, self._boundaries, self._streams.enter_units, in_full)
        self._results = StepResults(module, pipeline)
        self._step_check = StepCheck(module, units, self._calls, self._streams, pipeline)
        inside = {each for unit in units for each in unit.module.modules()}
        self._outside = [each for each in module.modules() if each not in inside]
        self._checked_steps: set[int] = set()
        self._checked_batches: set[str] = set()
        self._checked_epoch = -1
        self._first_step = 0

    def __str__(self) -> str:
        idle = idle_fraction(self.dims.pipeline, self._num_micro_batches, len(self._parts))
        return (
            f"{self.division}\nWith {self._num_micro_batches} micro-batches and equally fast stages, a stage waits for "
            f"{idle:.0%} of a training step."
        )

    def divide(self) -> None:
        """Divide the module among the stages. *Collective* over the world."""
        self.parameters.divide()
        if self.dims.pipeline > 1:
            self._calls.install(self._undo)
            lacking = [end for end in self.division.ends if end.stage != self.dims.stage]
            replace_end_calls(lacking, self._calls, self._undo)
            SharedAttributes(self.module, self._results, self._undo)
        log.info("module divided: %s, stage %d of %d", type(self.module).__name__, self.dims.stage, self.dims.pipeline)

    def start_fit(self) -> None:
        """Prepare for training; call this before the optimizers are created."""
        self.is_fit = True
        inside, outside = self.parameters.inside, self.parameters.outside
        self.gradients = StageGradients(inside, outside, self._pipeline, self._shards)

    def stop(self) -> None:
        """Restore the calls of the units, and what else was replaced for the run."""
        self._undo.close()

    def destroy_groups(self) -> None:
        """Destroy the process groups, after everything is sent and received. *Collective* over the pipeline."""
        self._results.finish()
        self._boundaries.finish()
        self._pipeline.destroy()

    def share_buffers(self) -> None:
        """Give all stages the buffers of the stage that computes them. *Collective* over the pipeline."""
        share_buffers(self.division, self._pipeline)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside the block on each rank."""
        self.gradients.accumulates = True
        try:
            yield
        finally:
            self.gradients.accumulates = False

    # Steps

    @contextmanager
    def replacing_step(self, name: str) -> Iterator[None]:
        """Inside the block, make the step `name` of the module run the passes of its micro-batches. *Collective*."""
        step = getattr(self.module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._shards is None else self._shards.unsharded():
                if name == "training_step":
                    return self._train(step, args, kwargs)
                return self._evaluate(name, step, args, kwargs)

        with ExitStack() as undo:
            shadow_method(self.module, name, run, undo)
            yield

    def _train(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `training_step` returns, on all stages, with a loss whose backward pass deposits the gradients.

        *Collective* over the pipeline.
        """
        batch, *others = args
        self.gradients.follow(self.module.trainer.optimizers)
        self._check_step(step, batch, others, kwargs)
        parts, sizes = split_batch(batch, [self.device] * self._num_micro_batches)
        records = [LogRecord(size) for size in sizes]
        self.gradients.set_aside()
        self._results.expect()
        try:
            outputs, weights = self._run_schedule(step, [(part, *others) for part in parts], kwargs, sizes, records)
        finally:
            self.gradients.take()
        known, correction = weights.known()
        joined = join_training_output(outputs, sizes, self.device, known) if self._pipeline.is_last else None
        if known != sizes:
            for record, output, weight in zip(records, outputs, known, strict=True):
                record.weigh(float(loss_of(output)), weight)
        output, correction = self._results.share((joined, correction), records)
        self._boundaries.finish()
        if isinstance(output, Tensor):
            return self.gradients.attached_to(output, correction)
        output["loss"] = self.gradients.attached_to(output["loss"], correction)
        return output

    def _run_schedule(
        self,
        step: Step,
        args_of: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        sizes: Sequence[int],
        records: Sequence[LogRecord],
    ) -> tuple[list[Any], MicroBatchWeights]:
        """Run the passes of all micro-batches. *Collective* over the pipeline.

        Args:
            step: `training_step` of the module.
            args_of: its arguments for each micro-batch.
            kwargs: its other arguments.
            sizes: the numbers of samples.
            records: what the steps of each log is added to these.

        Returns:
            On the last stage, what the steps return, and the weights of their losses.
        """
        outputs: list[Any] = [None] * len(sizes)
        graphs: dict[tuple[int, int], tuple[Tensor, Received | None]] = {}
        weights = MicroBatchWeights(sizes)
        self._boundaries.expect(len(sizes))
        stage, num_stages, schedule = self.dims.stage, self.dims.pipeline, self._options.schedule
        for each in passes_of_step(schedule, stage, num_stages, len(sizes), len(self._parts)):
            number, key = each.micro_batch, (each.micro_batch, each.part)
            if each.direction == "backward":
                self._backward(*graphs.pop(key))
                continue
            result = self._forward(
                "training_step", step, args_of[number], kwargs, records[number], part=each.part, micro_batch=number
            )
            if each.part == len(self.division.parts) - 1:
                outputs[number] = tree_map_only(Tensor, Tensor.detach, result)
                result = weights.weighted(number, loss_of(result))
            graphs[key] = result, self._boundaries.take_received()
        return outputs, weights

    def _evaluate(self, name: str, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `step`, the step `name` of the module, returns, on all stages. *Collective* over the pipeline."""
        record, is_first = LogRecord(1), name not in self._checked_batches
        if is_first:
            self._check_same_batch(name, args[0])
        output = self._forward_all(name, step, args, kwargs, record, is_checked=is_first)
        output = self._results.share(output if self._pipeline.is_last else None, [record])
        self._boundaries.finish()
        return output

    # Checks

    def _check_step(self, step: Step, batch: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Check the first step, and a few that follow optimizer steps. *Collective* over the pipeline.

        What a step changes may have no effect while parameters have their first values, such as an average of them.
        """
        trainer, is_first = self.module.trainer, not self._checked_steps
        if trainer.current_epoch != self._checked_epoch:
            self._checked_epoch = trainer.current_epoch
            check_parameter_hooks(self.module)
            if self._num_micro_batches > 1:
                check_batch_norms(self.module)
        if is_first:
            self._first_step = trainer.global_step
            self._check_same_batch("training_step", batch)
        number = trainer.global_step - self._first_step
        if number not in _CHECKED_STEPS or number in self._checked_steps:
            return
        self._checked_steps.add(number)

        def forward(part: Any, is_checked: bool) -> Tensor:
            result = self._forward_all(
                "training_step", step, (part, *others), kwargs, LogRecord(1), is_checked=is_checked
            )
            return loss_of(result) if self._pipeline.is_last else result

        if self._options.check_steps:
            # Two samples may have equally many tokens by chance, so the first time more of them are compared, if a
            # micro-batch has more: they take no more memory than a training step.
            of_micro_batch = math.ceil((num_samples_of(batch) or 1) / self._num_micro_batches)
            most = max(2, min(_NUM_COMPARED, of_micro_batch)) if is_first else 2
            self._step_check.run(batch, forward, 1 if self._num_micro_batches == 1 else most, is_first=is_first)
        if is_first and self.check_split is not None:
            self.check_split(batch, lambda part: self._passes_of_one(step, (part, *others), kwargs))
        check_parameter_hooks(self.module)  # which the step may have registered

    def _passes_of_one(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Run the passes of a batch that is not divided; return the loss on the last stage. *Collective*.

        The gradients are those that this stage computes.
        """
        (output,), _ = self._run_schedule(step, [args], kwargs, [1], [LogRecord(1)])
        self._boundaries.finish()
        return loss_of(output) if self._pipeline.is_last else None

    def _check_same_batch(self, step: str, batch: Any) -> None:
        """Check that all stages have the same batch. *Collective* over the pipeline."""
        self._checked_batches.add(step)
        check_same_batch(step, batch, "The stages of the pipeline", self._pipeline.values)

    # Passes

    def _forward_all(
        self, name: str, step: Step, args: Any, kwargs: dict[str, Any], record: LogRecord, *, is_checked: bool
    ) -> Any:
        """Return what `_forward` returns for the last part of this stage, after a pass through each, without backward.

        *Collective* over the pipeline.
        """
        result: Any = None
        for part in self._parts:
            result = self._forward(name, step, args, kwargs, record, part=part, is_checked=is_checked)
            self._boundaries.take_received()
        return result

    def _forward(
        self,
        name: str,
        step: Step,
        args: Any,
        kwargs: dict[str, Any],
        record: LogRecord,
        *,
        part: int,
        micro_batch: int = 0,
        is_checked: bool = False,
    ) -> Any:
        """Return what `step` returns if `part` is the last one; otherwise what stands for the activations it sent.

        Of several passes of a micro-batch on a stage, the last one alone logs and has effects outside of the units.
        """
        with ExitStack() as of_pass:
            is_last = part == self._parts[-1]
            shadow_method(self.module, "log", (record if is_last else LogRecord(1)).log, of_pass)
            if self.dims.pipeline == 1:
                return self._in_full(step(*args, **kwargs))
            if not is_last:
                of_pass.enter_context(rollback_attributes(self._outside))
            of_pass.enter_context(self._calls.forward_pass(part, is_checked=is_checked))
            of_pass.enter_context(self._streams.of_pass(micro_batch, part))
            try:
                output = self._in_full(step(*args, **kwargs))
                self._calls.check_complete(name)
            except StageDone as done:
                output = done.sent
            return output

    def _backward(self, result: Tensor, received: Received | None) -> None:
        self._boundaries.is_in_backward = True
        try:
            with torch.autocast(self.device.type, enabled=False):
                if result.requires_grad:
                    result.backward()  # type: ignore[no-untyped-call]
            if received is not None:
                received.answer_if_unused(self.device)
        finally:
            self._boundaries.is_in_backward = False


# The state of the module, in a run and between runs


class PipelineState(ShardedState):
    """The state of the module of `run`. Parameters of other stages are empty `FlatShard`s.

    Args:
        run: the current run.
        optimizers: the optimizers of the fit; if the run is an evaluation, those of an earlier fit.
        ended: the optimizers of past runs.
        ranks_per_node: number of ranks that share the memory of a node.
    """

    def __init__(
        self,
        run: PipelineRun,
        optimizers: Sequence[Optimizer],
        ended: EndedOptimizers,
        ranks_per_node: int,
    ) -> None:
        super().__init__(run.module, optimizers, run.device, ended)
        self._run = run
        self._ranks_per_node = ranks_per_node

    def full(self, parameter: Parameter, shard: Tensor | None) -> Tensor | None:
        """Return a full copy of what the stage that has `parameter` has of it. *Collective* over the pipeline."""
        return self._run.parameters.full(parameter, None if isinstance(shard, FlatShard) else shard)

    def gradient_norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of all gradients, or of those of one optimizer. *Collective* over the pipeline."""
        groups = [{"params": self.module.parameters()}] if optimizer is None else optimizer.param_groups
        return self._run.gradients.norm_of(parameter for group in groups for parameter in group["params"])

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module: all its parameters, with the values of all stages, on CPU. *Collective* over the world.

        If some ranks failed, or if a node lacks memory, parameters of other stages stay empty, with a warning.

        Args:
            ended: takes over the states of the optimizers of a fit.
            failed: whether an exception ended a run with several ranks.
        """
        run = self._run
        run.stop()
        obstacle: str | None
        if failed:
            obstacle = "the run failed, and the stages may not be at the same step"
        else:
            obstacle = host_memory_shortage(run.division.num_bytes, self._ranks_per_node)
        if obstacle is not None:
            rank_zero_warn(f"{type(run.module).__name__} stays divided among the stages: {obstacle}.")
        if obstacle is None:
            run.share_buffers()
        originals = run.parameters.restore(obstacle)
        if not failed:
            run.destroy_groups()
        if obstacle is None:
            if run.is_fit:
                for optimizer in self.optimizers:
                    ended.keep(optimizer, run.module, None, originals)
            run.module.cpu()


class EndedPipelineState(ShardedState):
    """The state of a module between runs: its parameters are on all ranks, the optimizer states on their stages."""

    def full_optimizer_state(self, parameter: Parameter, key: str) -> Tensor:
        """Raise a `ConfigurationError`."""
        raise ConfigurationError(
            "After a run in a pipeline, each stage has the optimizer states of its own parameters only. Call "
            "full_optimizer_state during the fit, such as in on_train_end."
        )
