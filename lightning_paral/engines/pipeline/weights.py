"""How much the loss of each micro-batch counts in the loss of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_paral.compat.torch.tensors import divisor_of


class MicroBatchWeights:
    """Weighs the losses of micro-batches by their samples, or by the targets that their cross entropies do not ignore.

    By what the cross entropy of the whole batch divides is known only after the backward passes of the first
    micro-batches. Gradients are therefore scaled by an estimate, and have to be corrected after the last.

    Args:
        sizes: the numbers of samples of the micro-batches.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._total = sizes, max(1, sum(sizes))
        self._divisors: dict[int, Tensor] = {}

    def weighted(self, number: int, loss: Tensor) -> Tensor:
        """Return the `loss` of a micro-batch, multiplied by its weight in the batch, which may be an estimate."""
        divisor = divisor_of(loss)
        if divisor is None:
            return loss * (self._sizes[number] / self._total)
        self._divisors[number] = divisor.float()
        return loss * (self._divisors[number] / self._estimate())

    def known(self) -> tuple[list[float], float]:
        """Return the weights of all micro-batches, and by what their gradients have to be multiplied."""
        if not self._divisors:
            return list(self._sizes), 1.0
        # A step may leave the cross entropy out if a micro-batch has no targets.
        none = torch.zeros_like(self._estimate())
        divisors = [self._divisors.get(number, none) for number in range(len(self._sizes))]
        *weights, estimate = torch.stack([*divisors, self._estimate()]).tolist()
        return weights, estimate / sum(weights) if any(weights) else 1.0

    def _estimate(self) -> Tensor:
        first, divisor = next(iter(self._divisors.items()))
        return divisor.mul(self._total / max(1, self._sizes[first])).clamp(min=1.0)
