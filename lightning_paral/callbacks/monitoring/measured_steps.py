"""Measure the steps of one rank: time by phase, samples, bytes on the wire, memory."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_paral.callbacks.monitoring.backward_wait import call_before_wait, forward_waits, waits_at_end_of_backward
from lightning_paral.callbacks.monitoring.batches import count_samples
from lightning_paral.callbacks.monitoring.clocks import clock_for
from lightning_paral.callbacks.monitoring.memory import HostBeforeFit, read_memory
from lightning_paral.callbacks.monitoring.rank_report import RankReport, StepSums
from lightning_paral.callbacks.monitoring.timeline import Phase, Timeline
from lightning_paral.comm.traffic import SentBytes
from lightning_paral.compat.lightning.training_steps import (
    actions_of_step,
    around_broadcast_before_batch,
    follow_profiler,
)
from lightning_paral.distributed.waits import listening

_MOST_PENDING = 32
"""After how many steps times are summed up at the latest."""


class MeasuredSteps:
    """Measures the steps of one fit on this rank, from its creation until `undo` is closed.

    Args:
        trainer: the Trainer of a fit that has started.
        num_ranks: the number of ranks.
        tokens_per_sample: the number of tokens of a sample, or a function that returns those of a batch.
        undo: a stack of functions that end the measurement.
        before: host memory when the fit began, if it is known.
    """

    def __init__(
        self,
        trainer: Trainer,
        num_ranks: int,
        tokens_per_sample: int | Callable[[Any], int] | None,
        undo: ExitStack,
        before: HostBeforeFit | None = None,
    ) -> None:
        self._before_fit = before
        self._device = trainer.strategy.root_device
        self._thread = threading.get_ident()
        self._tokens_per_sample = tokens_per_sample
        self._knows_waiting = num_ranks > 1 and waits_at_end_of_backward(trainer.model)
        self._own_phases = own_phases(trainer)
        self._sent = SentBytes() if num_ranks > 1 and self._device.type == "cpu" else None
        self._sent_in_fit = 0
        self._num_batches = self._num_batches_when_sent = 0
        self._first, self._window, self._fit = StepSums(), StepSums(), StepSums()
        self._has_reported = False
        self._hook: RemovableHandle | None = None
        self._timeline = Timeline(clock_for(self._device))
        labels = actions_of_step(
            trainer, data=Phase.DATA, forward=Phase.FORWARD, backward=Phase.BACKWARD, optimizer=Phase.OPTIMIZER
        )
        follow_profiler(trainer, labels, self._begin, self._end, undo)
        wait = (lambda: self._begin(Phase.WAITING)), (lambda: self._end(Phase.WAITING))
        around_broadcast_before_batch(trainer, *wait, undo)
        undo.enter_context(listening(*wait))

    def _begin(self, phase: Phase) -> None:
        if threading.get_ident() == self._thread:  # `paral_dp` has a thread for each replica
            self._timeline.begin(phase)

    def _end(self, phase: Phase) -> None:
        if threading.get_ident() == self._thread:
            self._timeline.end(phase)

    def before_backward(self, loss: Tensor) -> None:
        """Begin a backward pass."""
        self._begin(Phase.BACKWARD)
        if self._knows_waiting:
            self._hook = call_before_wait(loss, self._before_wait)

    def _before_wait(self) -> None:
        self._timeline.begin(Phase.WAITING)  # on CUDA, in a thread of the autograd engine; this one waits meanwhile

    def after_backward(self) -> None:
        """End a backward pass, and the waiting at its end."""
        self._end(Phase.BACKWARD)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def pause(self) -> None:
        """Count the time from now on to no step."""
        self._timeline.pause()

    def resume(self) -> None:
        """End what `pause` began."""
        self._timeline.resume()

    def end_batch(self, batch: Any) -> None:
        """End the step of a batch. This waits for nothing."""
        num_samples, tokens = count_samples(batch), self._tokens_per_sample
        num_tokens = 0 if tokens is None else tokens(batch) if callable(tokens) else tokens * num_samples
        self._timeline.end_step(num_samples, num_tokens)
        self._num_batches += 1
        if self._num_batches % _MOST_PENDING == 0:
            self._sum_up()

    def report_of_window(self) -> RankReport | None:
        """Return the report on the steps since the last one; `None` if the device has completed none of them."""
        self._sum_up()
        sent = self._take_sent()
        num_batches, self._num_batches_when_sent = self._num_batches - self._num_batches_when_sent, self._num_batches
        sums = self._window
        if not sums.num_steps:
            if self._has_reported or not self._first.num_steps:
                return None
            sums = self._first
        self._window, self._has_reported = StepSums(), True
        return self._report(sums, None if sent is None else sent / max(1, num_batches))

    def report_of_fit(self) -> RankReport | None:
        """Return the report on all steps but the first, which prepares much; `None` if there was no step.

        This waits for the device.
        """
        self._sum_up(wait=True)
        self._take_sent()
        sums = self._fit if self._fit.num_steps else self._first
        if not sums.num_steps:
            return None
        return self._report(sums, None if self._sent is None else self._sent_in_fit / self._num_batches)

    def _sum_up(self, *, wait: bool = False) -> None:
        steps = self._timeline.take_steps(wait=wait)
        if steps and not self._first.num_steps:
            self._first.add(steps[:1])
            steps = steps[1:]
        self._window.add(steps)
        self._fit.add(steps)

    def _take_sent(self) -> int | None:
        sent = None if self._sent is None else self._sent.take()
        if sent is None:
            self._sent = None
        else:
            self._sent_in_fit += sent
        return sent

    def _report(self, sums: StepSums, sent_bytes: float | None) -> RankReport:
        memory = read_memory(self._device, self._before_fit)
        return sums.report(memory, sent_bytes, knows_waiting=self._knows_waiting, own_phases=self._own_phases)


def own_phases(trainer: Trainer) -> tuple[Phase, ...]:
    """Return the phases in which no rank waits for others, as far as that is known of the strategy.

    Ranks that wait for others in a phase take as long in it as the slowest rank, so the phase does not tell which rank
    is slow.
    """
    model: Any = trainer.model
    has_buffers = any(True for _ in model.buffers())
    if waits_at_end_of_backward(model):
        forward = () if forward_waits(model) else (Phase.FORWARD,)
        return (Phase.DATA, *forward, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
    if not getattr(trainer.strategy, "forward_has_collectives", True) and not has_buffers:
        return Phase.DATA, Phase.FORWARD
    return (Phase.DATA,)
