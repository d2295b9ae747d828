"""Show while a model trains what a step costs: time, rates, traffic and memory."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_paral.callbacks.monitoring.measured_steps import MeasuredSteps
from lightning_paral.callbacks.monitoring.memory import HostBeforeFit
from lightning_paral.callbacks.monitoring.options import MonitorOptions
from lightning_paral.callbacks.monitoring.planned import PlannedCosts
from lightning_paral.callbacks.monitoring.progress_text import show_in_progress_bar
from lightning_paral.callbacks.monitoring.rank_report import RankReport
from lightning_paral.callbacks.monitoring.setup_hooks import call_after_setup_hooks
from lightning_paral.callbacks.monitoring.summary import summary_of
from lightning_paral.callbacks.monitoring.values import text_for_progress_bar, values_for_loggers
from lightning_paral.compat.lightning.training_steps import step_of_loggers
from lightning_paral.distributed.latest_values import LatestValues
from lightning_paral.errors import ParalError
from lightning_paral.option_types import checked_options
from lightning_paral.planning.plan import plan_fit
from lightning_paral.tables import make_console

_PATIENCE = timedelta(seconds=2)
"""How long rank 0 waits for the reports of the other ranks, once, when the training has ended."""


class ParalMonitor(Callback):
    """Measures training steps under any strategy: `Trainer(callbacks=[ParalMonitor()])`.

    After every `every_n_steps` training batches, all loggers of the Trainer get values whose names begin with `paral/`,
    and the progress bar shows the most important ones. Rank 0 prints a table at the end of the fit. With gradient
    accumulation too, a step is a training batch. Validation, and the time between two epochs, belong to no step. A
    resumed fit is measured anew. `trainer.callback_metrics` and checkpoints stay as they are without the callback.

    The time of a step has these parts: `data` (waiting for the loader, and moving the batch to the device), `forward`
    (`training_step`), `backward`, `optimizer` (with clipping), `waiting` (for other ranks), and `other` (callbacks,
    loggers, learning rate schedulers, saving). In manual optimization, the backward pass is known if it is run by
    `self.manual_backward`; otherwise it counts as `forward`.

    On CUDA, the parts are those of the device's time: they are measured with events, for which the host never waits in
    a step.

    Waiting for other ranks is measured under DDP: at the end of the backward pass, where the gradients of the slowest
    rank, and their transfer, are waited for. In addition, Lightning makes all ranks wait for rank 0 before each batch.
    FSDP and ZeRO wait inside of their passes, where it cannot be measured without a cost, so the value is left out.

    The slowest rank is the one whose own part of a step takes longest. Under DDP, that is everything but waiting; if
    the model has buffers, which rank 0 broadcasts, also without `forward`. Under other strategies it is `data`, and
    also `forward` where no rank waits in the forward pass: under ZeRO-1 and ZeRO-2, if the model has no buffers.

    Ranks send each other their values through the store of the process group, not by a collective, and none waits for
    another. A rank that does not report is left out.

    Args:
        every_n_steps: after how many training batches to report.
        tokens_per_sample: the number of tokens of each sample, or a function that returns the number of tokens of a
            batch. It is called in each step, so it must not read a tensor of the device.
        flops_per_step: the floating-point operations of one rank in the forward and backward pass of a batch. Together
            with `peak_flops`, the MFU is shown: which part of the peak is used.
        peak_flops: the floating-point operations per second that the device of a rank can do, such as `989e12`.
        planned_bytes: the bytes per rank that were planned, to show them beside the measured peak. `paral_auto` gives
            its own plan if this is left out.
        plan: whether rank 0 plans the fit when it begins, for the strategy in use, to show the predicted memory and
            traffic beside the measured ones at the end. Off by default, because the fit begins later: a fork of rank 0
            follows a step, which takes about a second for a small module, while the other ranks wait in their next
            collective. If the fit cannot be planned, a line says why, and the fit goes on.
        show_in_progress_bar: whether the progress bar shows the time of a step, the rate, and the slow rank.
        print_summary: whether rank 0 prints a table at the end of the fit.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    @checked_options
    def __init__(
        self,
        every_n_steps: int = 50,
        tokens_per_sample: int | Callable[[Any], int] | None = None,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        planned_bytes: int | None = None,
        plan: bool = False,
        show_in_progress_bar: bool = True,
        print_summary: bool = True,
    ) -> None:
        self.options = MonitorOptions(
            every_n_steps=every_n_steps,
            tokens_per_sample=tokens_per_sample,
            flops_per_step=flops_per_step,
            peak_flops=peak_flops,
            planned_bytes=planned_bytes,
            plan=plan,
            show_in_progress_bar=show_in_progress_bar,
            print_summary=print_summary,
        )
        """The options."""
        self.reports: dict[int, RankReport] = {}
        """On rank 0, the last report of each rank; after a fit, the report on the whole fit."""
        self.values: dict[str, float] = {}
        """On rank 0, the values of `reports` as loggers get them."""
        self.planned: PlannedCosts | None = None
        """What was planned for a rank; on rank 0."""
        if planned_bytes is not None:
            self.planned = PlannedCosts(peak_bytes=planned_bytes)
        self._before_fit: HostBeforeFit | None = None
        self._steps: MeasuredSteps | None = None
        self._others: LatestValues | None = None
        self._undo = ExitStack()
        self._text = ""
        self._num_ranks = self._num_data_ranks = 1
        self._num_batches = 0

    def expect(self, planned_bytes: int) -> None:
        """Show `planned_bytes` beside what is measured, unless the user has given a plan."""
        if self.options.planned_bytes is None:
            self.planned = PlannedCosts(peak_bytes=planned_bytes)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember the memory before a fit, and plan the fit after all hooks `setup` if the option `plan` is set."""
        if stage != "fit":
            return
        self._end()
        self._before_fit = HostBeforeFit(pl_module)
        if self.options.plan:
            self.planned = None
            if trainer.is_global_zero:
                call_after_setup_hooks(trainer, lambda: self._plan(trainer, pl_module), self._undo)

    def _plan(self, trainer: Trainer, module: LightningModule) -> None:
        if self.planned is not None:  # `paral_auto` has planned the fit
            return
        try:
            made = plan_fit(trainer, module)
        except (ParalError, OSError) as error:
            rank_zero_warn(f"ParalMonitor(plan=True) has no plan to compare with: {error}")
        else:
            self.planned = PlannedCosts(peak_bytes=made.peak_bytes)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        self._end()
        self._num_ranks = trainer.world_size
        sampling = trainer.distributed_sampler_kwargs if self._num_ranks > 1 else None
        self._num_data_ranks = int(sampling["num_replicas"]) if sampling else 1
        self.reports, self.values, self._text, self._num_batches = {}, {}, "", 0
        self._others = LatestValues("monitor/steps", self._num_ranks)
        if self.options.show_in_progress_bar and trainer.is_global_zero:
            show_in_progress_bar(trainer, lambda: self._text, self._undo)
        self._steps = MeasuredSteps(
            trainer, self._num_ranks, self.options.tokens_per_sample, self._undo, self._before_fit
        )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Begin a backward pass."""
        if self._steps is not None:
            self._steps.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a backward pass."""
        if self._steps is not None:
            self._steps.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step, and report after every `every_n_steps`."""
        if self._steps is None:
            return
        self._steps.end_batch(batch)
        self._num_batches += 1
        if self._num_batches % self.options.every_n_steps == 0:
            self._exchange(trainer, self._steps.report_of_window(), self._others)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count validation to no step."""
        if self._steps is not None:
            self._steps.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue to measure steps."""
        if self._steps is not None:
            self._steps.resume()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time between two epochs to no step."""
        if self._steps is not None:
            self._steps.pause()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue to measure steps."""
        if self._steps is not None:
            self._steps.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the reports on the whole fit. Rank 0 waits up to two seconds for those of the other ranks."""
        if self._steps is None:
            return
        report, has_logged = self._steps.report_of_fit(), bool(self.values)
        fit = LatestValues("monitor/fit", self._num_ranks)
        self._exchange(trainer, report, fit, wait=_PATIENCE, log=not has_logged)
        self._end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary on rank 0, below the progress bar."""
        if self.reports and self.options.print_summary and trainer.is_global_zero:
            summary = summary_of(self.reports, self.options, self._num_ranks, self._num_data_ranks, self.planned)
            make_console().print(summary)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End what `on_train_start` began."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End what `on_train_start` began, because `teardown` is not called after an exception."""
        self._end()

    def _exchange(
        self,
        trainer: Trainer,
        report: RankReport | None,
        others: LatestValues | None,
        wait: timedelta | None = None,
        log: bool = True,
    ) -> None:
        """Give this rank's report to the others. On rank 0, read theirs, and pass the values on.

        Args:
            trainer: the Trainer.
            report: the report of this rank; `None` if there is nothing to report.
            others: where ranks write their reports.
            wait: how long to wait for the reports of the other ranks.
            log: whether loggers get the values.
        """
        if report is None or others is None:
            return
        others.write(report.to_json())
        if not trainer.is_global_zero:
            return
        self.reports = {rank: RankReport.from_json(text) for rank, text in others.read(wait).items()}
        self.values = values_for_loggers(self.reports, self.options, self._num_data_ranks, self.planned)
        self._text = text_for_progress_bar(self.reports, self.options, self._num_data_ranks)
        if log:
            for logger in trainer.loggers:
                logger.log_metrics(self.values, step=step_of_loggers(trainer))

    def _end(self) -> None:
        self._undo.close()
        self._undo = ExitStack()
        self._steps = self._others = None
