"""Values logged in training that equal those of one process, even if ranks have different numbers of samples."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from lightning.pytorch import Trainer
from torch.nn import Module, SyncBatchNorm

from lightning_paral.data.logged_agreement import LoggedHistory
from lightning_paral.data.uneven_metrics import change_updates, metrics_of_run
from lightning_paral.data.weighted_results import WeightedResults, are_constant
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

_OUTSIDE_OF_STEPS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")


class Division(Protocol):
    """How the batch of the current training step is divided among the data ranks."""

    def loss_weight(self) -> float:
        """Return this rank's number of samples, divided by the mean number; 1.0 on all ranks or on none."""
        ...

    def repeats_a_sample(self) -> bool:
        """Return whether the batch has fewer samples than there are data ranks."""
        ...

    def had_larger_batches(self) -> bool:
        """Return whether earlier batches had more samples than there are data ranks."""
        ...


class TrainingResults(WeightedResults):
    """Lightning's results of training. The repeated sample of a rank that has none of its own counts nowhere.

    Args:
        trainer: the Trainer.
        dims: the parallel dimensions.
        division: how batches are divided among the data ranks.
        history: remembers what this rank has reduced.
    """

    def __init__(self, trainer: Trainer, dims: ParallelDims, division: Division, history: LoggedHistory) -> None:
        self._trainer = trainer
        self._division = division
        self._batch: Any = None
        self._step: ExitStack | None = None
        self._num_uneven_steps = 0  # in this epoch
        self._metrics: list[Any] | None = None  # found in this epoch
        self._num_updates: dict[str, int] = {}  # of the logged metrics, while hooks at the end of the epoch run
        super().__init__(dims, history, training=True)

    @property
    def batch(self) -> Any:
        """The current batch. Lightning sets it when a batch begins, and to `None` when its last hook has ended."""
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._batch = batch
        if self._step is not None:
            self.end_step()
        if batch is None:
            self.history.begin_part()
            return
        loop = self._trainer.fit_loop.epoch_loop
        self.history.begin_part(f"training batch {loop.batch_idx} of epoch {self._trainer.current_epoch}")
        if (weight := self._division.loss_weight()) != 1.0:
            self._begin_uneven_step(weight)

    def _begin_uneven_step(self, weight: float) -> None:
        self._num_uneven_steps += 1
        module = self._trainer.lightning_module
        if self._division.repeats_a_sample():
            _reject_sync_batch_norm(module)
        if self._metrics is None or not weight:
            self._metrics = metrics_of_run(self._trainer)
        self._step = ExitStack()
        change_updates(self._metrics, weight, self._step)

    def end_step(self) -> None:
        """End an uneven step: metrics count what they are updated with."""
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def weight_of(self, hook: str) -> float:
        """Return the weight of this rank's samples in the current step; 1.0 in hooks outside of steps."""
        return 1.0 if hook in _OUTSIDE_OF_STEPS else self._division.loss_weight()

    def step_shows_constants(self) -> bool:
        """Return whether this or an earlier step had more samples than there are data ranks."""
        return not self._division.repeats_a_sample() or self._division.had_larger_batches()

    def check_keys(self) -> None:
        """Check that all data ranks log the same keys, and complete their means. *Collective* over the data ranks."""
        self.end_step()
        super().check_keys()
        num_uneven_steps, self._num_uneven_steps, self._metrics = self._num_uneven_steps, 0, None
        if num_uneven_steps:
            self._complete_means()

    @contextmanager
    def computed_before_hooks(self) -> Iterator[None]:
        """Compute the values of the epoch on all ranks; then, run the hooks of its end. *Collective* over data ranks.

        Otherwise the progress bar, and hooks of some ranks that read them, would compute them before the other ranks.

        Raises:
            ConfigurationError: a hook updates a metric that was logged before.
        """
        self.metrics(on_step=False)
        self._num_updates = {key: each.value.update_count for key, each in self.valid_items() if not each.is_tensor}
        try:
            yield
        finally:
            self._num_updates = {}

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        for key, count in {} if on_step else self._num_updates.items():
            if key in self and not self[key].has_reset and self[key].value.update_count > count:
                fx, name = key.split(".", 1)
                raise ConfigurationError(
                    f"The metric {name!r} was logged in {fx}, and then updated in a hook at the end of the epoch. With "
                    "several ranks, its value is computed before these hooks. Log it in on_train_epoch_end, after the "
                    "update, instead."
                )
        return super().metrics(on_step)

    def _complete_means(self) -> None:
        """Weight the means of values that were logged with a constant batch size."""
        ours = {key: self.mean_of(key) for key in self._batch_sizes if key in self}
        by_rank = self.dims.data_rank_group().gather(ours)
        for key, mean in ours.items():
            means = [theirs[key] for theirs in by_rank if key in theirs]
            if len(means) == len(by_rank) and are_constant(means):
                metric = self[key]
                metric.value = metric.value + mean.missing_value.to(metric.value.device)
                metric.cumulated_batch_size = metric.cumulated_batch_size + mean.missing_size
        self._batch_sizes.clear()


def _reject_sync_batch_norm(module: Module) -> None:
    """Raise a `ConfigurationError` if the repeated sample would change the activations of other ranks."""
    name = next((name for name, part in module.named_modules() if isinstance(part, SyncBatchNorm)), None)
    if name is not None:
        raise ConfigurationError(
            f"A batch has fewer samples than there are ranks, and {name} is a SyncBatchNorm. A sample that a rank "
            "repeats, because it has none of its own, would change the statistics of all ranks, and with them the "
            "gradient. Set drop_last=True in the loader, or leave out sync_batchnorm=True."
        )
