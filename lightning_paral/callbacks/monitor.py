"""Report while a model trains the time of a step, the slowest rank, and memory beside what was planned."""

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.compat.lightning.loops import step_of_loggers
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.errors import ConfigurationError
from lightning_paral.text import format_bytes, format_seconds


class ParalMonitor(Callback):
    """Reports step time, the slowest rank and memory under any strategy: `Trainer(callbacks=[ParalMonitor()])`.

    After every `every_n_steps` training batches, all loggers of the Trainer get these values, which are means over the
    steps since the last report, and the progress bar shows the most important ones:

    - `paral/step_seconds`: the time of a step, as a mean over the ranks. A step is a training batch, also with gradient
      accumulation. Validation and the time between two epochs belong to no step, nor does the first batch of a fit.
    - `paral/slowest_rank` and `paral/slowest_rank_lag_seconds`: the rank whose own part of a step takes longest, and by
      how much longer than the median of the other ranks. The own part is loading the batch. Where no rank waits for
      others in the forward pass (DDP, ZeRO-1 and ZeRO-2, if the model has no buffers), it is also the forward pass: on
      CUDA the time of the device.
    - `paral/peak_bytes` and `paral/worst_peak_bytes`: the most memory that rank 0, and the rank with the most, has used
      so far. On CUDA, that of torch's allocator; otherwise, the resident memory of the process, with all libraries.
    - `paral/planned_bytes`: what was planned for a rank.

    All ranks need the same `every_n_steps`, because each report is one small exchange between them through host memory
    (through the devices under a strategy of Lightning's on NCCL). In other steps, only clocks are read.

    Args:
        every_n_steps: after how many training batches to report.
        planned_bytes: the bytes per rank that were planned, to show them beside the measured peak, such as
            `plan(...).of("paral_fsdp").peak_bytes`. `paral_auto` gives its own plan if this is left out.
        show_in_progress_bar: whether the progress bar shows the values.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        planned_bytes: int | None = None,
        show_in_progress_bar: bool = True,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(f"ParalMonitor(every_n_steps={every_n_steps}) never reports. Give at least 1.")
        self.every_n_steps, self.planned_bytes = every_n_steps, planned_bytes
        self.show_in_progress_bar = show_in_progress_bar
        self.values: dict[str, float] = {}
        """The last values, as loggers get them; on each rank, with its own peak."""
        self._planned = planned_bytes
        self._undo = ExitStack()
        self._step_began: float | None = None

    def expect(self, planned_bytes: int) -> None:
        """Show `planned_bytes` as the plan, unless the user has given one."""
        if self.planned_bytes is None:
            self._planned = planned_bytes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        self._undo.close()
        self.values, self._text, self._num_batches = {}, "", 0
        self._step_began, self._forward_began = None, None
        self._forward_waits = _forward_waits(trainer)
        self._begin_window()
        bar: Any = trainer.progress_bar_callback
        if self.show_in_progress_bar and bar is not None:
            # Not by `self.log`, which would add the text to the metrics that other callbacks and loggers see.
            get_metrics = bar.get_metrics

            def with_text(*args: Any, **kwargs: Any) -> dict[str, Any]:
                metrics: dict[str, Any] = get_metrics(*args, **kwargs)
                return metrics | ({"paral": self._text} if self._text else {})

            shadow_method(bar, "get_metrics", with_text, self._undo)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward pass."""
        if self._step_began is not None:
            self._own_seconds += time.perf_counter() - self._step_began
            if not self._forward_waits:
                self._forward_began = _now(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """End the forward pass."""
        if self._forward_began is not None:
            self._forwards.append((self._forward_began, _now(trainer)))
            self._forward_began = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step, and report after every `every_n_steps`. *Collective* over the world if so."""
        now = time.perf_counter()
        if self._step_began is not None:
            self._step_seconds += now - self._step_began
            self._num_steps += 1
        self._step_began, self._forward_began = now, None
        self._num_batches += 1
        if self._num_batches % self.every_n_steps == 0:
            self._report(trainer)
            self._begin_window()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count validation to no step."""
        self._begin_step_again()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time between two epochs to no step."""
        self._begin_step_again()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the progress bar, and forget the plan of this fit."""
        self._undo.close()
        self._planned = self.planned_bytes

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the progress bar, because `teardown` is not called after an exception."""
        self._undo.close()

    def _begin_step_again(self) -> None:
        if self._step_began is not None:
            self._step_began = time.perf_counter()

    def _begin_window(self) -> None:
        self._num_steps, self._step_seconds, self._own_seconds = 0, 0.0, 0.0
        self._forwards: list[tuple[Any, Any]] = []

    def _report(self, trainer: Trainer) -> None:
        """Exchange the means and peaks of the ranks, and pass them on. *Collective* over the world."""
        if not self._num_steps:  # with `every_n_steps=1`, after the first batch
            return
        step, own = self._step_seconds / self._num_steps, self._own_seconds / self._num_steps + _mean(self._forwards)
        row = (step, own, _peak_bytes(trainer))
        shares = trainer.world_size > 1 and dist.is_initialized()
        steps, owns, peaks = zip(*(gather_objects(row) if shares else [row]), strict=True)
        values = {"step_seconds": statistics.fmean(steps), "peak_bytes": row[2], "worst_peak_bytes": max(peaks)}
        text = f"{format_seconds(values['step_seconds'])}, {format_bytes(max(peaks))}"
        if self._planned is not None:
            values["planned_bytes"] = self._planned
            text += f" of {format_bytes(self._planned)} planned"
        if len(owns) > 1:
            slowest = max(range(len(owns)), key=owns.__getitem__)
            lag = owns[slowest] - statistics.median(owns[:slowest] + owns[slowest + 1 :])
            values |= {"slowest_rank": slowest, "slowest_rank_lag_seconds": lag}
            text += f", rank {slowest} +{format_seconds(lag)}"
        self.values, self._text = {f"paral/{name}": value for name, value in values.items()}, text
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self.values, step=step_of_loggers(trainer))


def _peak_bytes(trainer: Trainer) -> int:
    device = trainer.strategy.root_device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_resident_bytes()


def _forward_waits(trainer: Trainer) -> bool:
    """Return whether a forward pass may wait for other ranks, so that its time does not tell which rank is slow."""
    model: Any = trainer.model
    is_ddp = isinstance(model, DistributedDataParallel)
    return getattr(trainer.strategy, "forward_has_collectives", not is_ddp) or any(True for _ in model.buffers())


def _now(trainer: Trainer) -> Any:
    """Return a moment of the device's time on CUDA, without waiting for it; else of the host's."""
    if trainer.strategy.root_device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _mean(intervals: list[tuple[Any, Any]]) -> float:
    """Return the mean length in seconds of those intervals that the device has completed; 0 if there are none."""
    on_host = [end - begin for begin, end in intervals if isinstance(begin, float)]
    on_device = [begin.elapsed_time(end) / 1e3 for begin, end in intervals if not on_host and end.query()]
    return statistics.fmean(on_host or on_device or [0.0])


def _peak_resident_bytes() -> int:
    """Return the largest resident memory in bytes since the process started, or since its peak was reset.

    0 where the system does not tell it.
    """
    # Not `getrusage`: its peak includes that of the process from which this one was started.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
