"""Tell whether a batch size that is logged with a mean is a constant, or the number of samples of a rank."""

from dataclasses import dataclass

from torch import Tensor

from lightning_paral.compat.lightning.results import ResultMetric


@dataclass(frozen=True)
class Summary:
    """What a rank knows about the batch sizes with which it logged a key in an epoch."""

    constant: float | None
    """The batch size, if it was the same in all steps."""
    shows_constants: bool
    """Whether the number of the rank's samples was not 1 in all steps, so that a batch size of 1 is a constant."""


class BatchSizes:
    """Batch sizes with which a key was logged in uneven steps, and what its mean lacks if they are a constant.

    A batch size that the user passes to `self.log` may be the number of this rank's samples or tokens: over all ranks
    these numbers add up to that of one process. Or it may be a constant, such as the batch size of the loader, which
    one process passes as well: it has to be divided among the ranks like the samples. Only a comparison of what the
    ranks have logged tells which of the two it is.
    """

    def __init__(self) -> None:
        self.value: Tensor | float = 0.0
        """What the sum of values times batch sizes lacks if the batch size is a constant."""
        self.size: Tensor | float = 0.0
        """What the sum of batch sizes lacks if the batch size is a constant."""
        self._sizes: set[float] = set()  # at most two
        self._shows_constants = False
        self._num_without_sample = 0

    def add(self, value: Tensor, batch_size: int, weight: float, shows_constants: bool) -> None:
        """Add a value logged in an uneven step.

        Args:
            value: the value.
            batch_size: the batch size.
            weight: this rank's number of samples, divided by the mean number of all data ranks.
            shows_constants: whether this or an earlier step had more samples than there are data ranks.
        """
        size = float(batch_size)
        if len(self._sizes) < 2:
            self._sizes.add(size)
        self._shows_constants |= shows_constants
        if weight:
            missing = size * weight - size
            self.value = self.value + value.detach() * missing
            self.size = self.size + missing
        else:
            self._num_without_sample += 1

    def summary(self, metric: ResultMetric) -> Summary:
        """Return what other ranks need to know. `metric` has all values that were logged in the epoch."""
        num_counted = metric.update_count - self._num_without_sample
        total = float(metric.cumulated_batch_size)
        size = max(self._sizes) if self._sizes else total / max(1, num_counted)
        is_constant = len(self._sizes) <= 1 and total == size * num_counted
        return Summary(size if is_constant else None, self._shows_constants)


def are_constant(summaries: list[Summary]) -> bool:
    """Return whether all ranks logged with the same batch size, which is not their number of samples."""
    constant = summaries[0].constant
    if constant is None or any(each.constant != constant for each in summaries):
        return False
    return constant != 1.0 or any(each.shows_constants for each in summaries)
