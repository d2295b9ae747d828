"""One run of a pipeline: divide the module among the stages, train or evaluate it, and restore it."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
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
from lightning_paral.engines.pipeline.calls import Boundaries, Pipeline, Received, StageDone, UnitCalls
from lightning_paral.engines.pipeline.checks import StepCheck, check_batch_norms, check_parameter_hooks
from lightning_paral.engines.pipeline.division import divide
from lightning_paral.engines.pipeline.gradients import StageGradients
from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.engines.pipeline.parameters import Shards, StageParameters
from lightning_paral.engines.pipeline.results import SharedAttributes, StepResults, loss_of
from lightning_paral.engines.pipeline.schedule import MicroBatchWeights, RandomStreams, idle_fraction, passes_of_step
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.host_memory_check import host_memory_shortage

Step = Callable[..., Any]
CheckSplit = Callable[[Any, Callable[[Any], Tensor | None]], None]
"""Called with the first batch, and with what runs the passes of a batch that is not divided."""


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
        self.undo = ExitStack()
        """Undoes what was replaced for the run."""
        self._shards = shards
        self._in_full = in_full
        self.check_split: CheckSplit | None = None
        """Checks in the first training step that splitting layers over tensor ranks changes nothing."""
        self._parts = parts = self.division.parts_of(dims.stage)
        self._pipeline = pipeline = Pipeline(dims, device, is_ring=len(self.division.parts) > dims.pipeline)
        self.parameters = StageParameters(self.division, pipeline, deferred, shards)
        units = self.division.units.inner
        self._boundaries = Boundaries(pipeline, parts, len(self.division.parts))
        self._streams = RandomStreams(module, parts)
        own = {part: self.division.parts[part] for part in parts}
        self._calls = UnitCalls(units, own, self._boundaries, self._streams.enter_units, in_full)
        self._results = StepResults(module, pipeline)
        self._step_check = StepCheck(module, self._calls, pipeline)
        inside = {each for unit in units for each in unit.module.modules()}
        self._outside = [each for each in module.modules() if each not in inside]
        self._checks_left = [0, 1, 2, 4]
        """Numbers of optimizer steps after which a training step is checked."""
        self._had_batches: set[str] = set()
        """The steps that have had a batch."""
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
            lacking = [end for end in self.division.ends if end.stage != self.dims.stage]
            self._calls.install(lacking, self.undo)
            SharedAttributes(self.module, self._results, self.undo)

    def start_fit(self) -> None:
        """Prepare for training; call this before the optimizers are created."""
        self.is_fit = True
        self.gradients = StageGradients(self.parameters, self._pipeline, self._shards)
        self.gradients.install(self.module.trainer.precision_plugin, self.undo)

    def stop(self, obstacle: str | None, *, failed: bool) -> dict[Parameter, Parameter]:
        """Restore the module, and what else was replaced for the run. *Collective* over the pipeline unless `failed`.

        Args:
            obstacle: the reason why the module stays divided; `None` if it does not.
            failed: whether other ranks may not take part in collectives.

        Returns:
            dict[Parameter, Parameter]: the module's own parameters by the objects that stood for them.
        """
        self.undo.close()
        if obstacle is None:
            self.parameters.share_buffers()
        originals = self.parameters.restore(obstacle)
        if not failed:
            self._results.finish()
            self._boundaries.finish()
            self._pipeline.destroy()
        return originals

    # Steps

    def replacing_step(self, name: str) -> ExitStack:
        """Make the step `name` of the module run the passes of its micro-batches, until what is returned exits."""
        step = getattr(self.module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._shards is None else self._shards.unsharded():
                if name == "training_step":
                    return self._train(partial(step, **kwargs), *args)
                return self._evaluate(name, partial(step, **kwargs), args)

        undo = ExitStack()
        shadow_method(self.module, name, run, undo)
        return undo

    def _train(self, step: Step, batch: Any, *others: Any) -> Any:
        """Return what `training_step` returns, on all stages, with a loss whose backward pass deposits the gradients.

        *Collective* over the pipeline.
        """
        self.gradients.follow(self.module.trainer.optimizers)
        self._check_step(step, batch, others)
        parts, sizes = split_batch(batch, [self.device] * self._num_micro_batches)
        records = [LogRecord(size) for size in sizes]
        self._results.expect()
        with self.gradients.of_step():
            outputs, weights = self._run_schedule(step, [(part, *others) for part in parts], sizes, records)
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
        self, step: Step, args_of: Sequence[tuple[Any, ...]], sizes: Sequence[int], records: Sequence[LogRecord]
    ) -> tuple[list[Any], MicroBatchWeights]:
        """Run the passes of all micro-batches. *Collective* over the pipeline.

        Args:
            step: `training_step` of the module.
            args_of: its arguments for each micro-batch.
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
            result = self._forward("training_step", step, args_of[number], records[number], each.part, number)
            if each.part == len(self.division.parts) - 1:
                outputs[number] = tree_map_only(Tensor, Tensor.detach, result)
                result = weights.weighted(number, loss_of(result))
            graphs[key] = result, self._calls.received
        return outputs, weights

    def _evaluate(self, name: str, step: Step, args: tuple[Any, ...]) -> Any:
        """Return what `step`, the step `name` of the module, returns, on all stages. *Collective* over the pipeline."""
        record = LogRecord(1)
        self._calls.is_checked = self._is_first(name, args[0])
        output = self._forward_all(name, step, args, record)
        self._calls.is_checked = False
        output = self._results.share(output if self._pipeline.is_last else None, [record])
        self._boundaries.finish()
        return output

    # Checks

    def _is_first(self, step: str, batch: Any) -> bool:
        """Return whether `batch` is the first of `step`, and check if so that all stages have it.

        *Collective* over the pipeline.
        """
        if step in self._had_batches:
            return False
        self._had_batches.add(step)
        check_same_batch(step, batch, "The stages of the pipeline", self._pipeline.values)
        return True

    def _check_step(self, step: Step, batch: Any, others: Sequence[Any]) -> None:
        """Check the first step, and a few that follow optimizer steps. *Collective* over the pipeline.

        What a step changes may have no effect while parameters have their first values, such as an average of them.
        """
        trainer = self.module.trainer
        if trainer.current_epoch != self._checked_epoch:
            self._checked_epoch = trainer.current_epoch
            check_parameter_hooks(self.module)
            if self._num_micro_batches > 1:
                check_batch_norms(self.module)
        is_first = self._is_first("training_step", batch)
        if is_first:
            self._first_step = trainer.global_step
        number = trainer.global_step - self._first_step
        if number not in self._checks_left:
            return
        self._checks_left.remove(number)

        def forward(part: Any) -> Tensor:
            result = self._forward_all("training_step", step, (part, *others), LogRecord(1))
            return loss_of(result) if self._pipeline.is_last else result

        def forward_and_backward(part: Any) -> Tensor | None:
            outputs, _ = self._run_schedule(step, [(part, *others)], [1], [LogRecord(1)])
            self._boundaries.finish()
            return loss_of(outputs[0]) if self._pipeline.is_last else None

        if self._options.check_steps:
            # Two samples may have equally many tokens by chance, so the first time more of them are compared, if a
            # micro-batch has more: they take no more memory than a training step.
            of_micro_batch = math.ceil((num_samples_of(batch) or 1) / self._num_micro_batches)
            most = max(2, min(8, of_micro_batch)) if is_first else 2
            self._step_check.run(batch, forward, 1 if self._num_micro_batches == 1 else most, is_first=is_first)
        if is_first and self.check_split is not None:
            self.check_split(batch, forward_and_backward)
        check_parameter_hooks(self.module)  # which the step may have registered

    # Passes

    def _forward_all(self, name: str, step: Step, args: Any, record: LogRecord) -> Any:
        """Return what `_forward` returns for the last part of this stage, after a pass through each, without backward.

        *Collective* over the pipeline.
        """
        return [self._forward(name, step, args, record, part) for part in self._parts][-1]

    def _forward(self, name: str, step: Step, args: Any, record: LogRecord, part: int, micro_batch: int = 0) -> Any:
        """Return what `step` returns if `part` is the last one; otherwise what stands for the activations it sent.

        Of several passes of a micro-batch on a stage, the last one alone logs and has effects outside of the units.
        """
        is_last = part == self._parts[-1]
        try:
            with ExitStack() as of_pass:
                shadow_method(self.module, "log", (record if is_last else LogRecord(1)).log, of_pass)
                if not is_last:
                    of_pass.enter_context(rollback_attributes(self._outside))
                if self.dims.pipeline > 1:
                    of_pass.enter_context(self._streams.of_pass(micro_batch, part))
                    of_pass.enter_context(self._calls.forward_pass(name, part))  # notes draws before that restores
                return self._in_full(step(*args))
        except StageDone as done:
            return done.sent

    def _backward(self, result: Tensor, received: Received | None) -> None:
        self._boundaries.is_in_backward = True
        with torch.autocast(self.device.type, enabled=False):
            if result.requires_grad:
                result.backward()  # type: ignore[no-untyped-call]
        if received is not None:
            received.answer()
        self._boundaries.is_in_backward = False


# The state of the module


class PipelineState(ShardedState):
    """The state of the module of `run`. Parameters of other stages are empty `FlatShard`s.

    Args:
        run: the current run.
        optimizers: the optimizers of the fit; if the run is an evaluation, those of an earlier fit.
        ended: the optimizers of past runs.
        ranks_per_node: number of ranks that share the memory of a node.
    """

    def __init__(
        self, run: PipelineRun, optimizers: Sequence[Optimizer], ended: EndedOptimizers, ranks_per_node: int
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
        try:
            if failed:
                obstacle: str | None = "the run failed, and the stages may not be at the same step"
            else:
                obstacle = host_memory_shortage(run.division.num_bytes, self._ranks_per_node)
            originals = run.stop(obstacle, failed=failed)
        finally:
            run.undo.close()  # also if the failure of another rank interrupts this one
        if obstacle is not None:
            rank_zero_warn(f"{type(run.module).__name__} stays divided among the stages: {obstacle}.")
            return
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
