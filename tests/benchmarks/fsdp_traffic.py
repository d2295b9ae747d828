"""Measure the bytes that each rank sends per step under FSDP, next to the formula, in sizes of the model.

    python -m tests.benchmarks.fsdp_traffic

Counted as in `zero_traffic`. Parameters are gathered for forward and backward, gradients reduced once: 3(N-1)/N.
`reshard_after_forward=False` gathers once: 2(N-1)/N.
"""

from lightning_paral import ParalFSDPStrategy
from tests.benchmarks.zero_traffic import print_sent, sent_per_step


def model_sizes_sent_per_step(reshard: bool | None) -> float:
    """Return what this rank sends. *Collective* over the default group."""
    return sent_per_step(lambda: ParalFSDPStrategy(units=["Linear"], reshard_after_forward=reshard))


def model_sizes_by_formula(reshard: bool | None, num_ranks: int) -> float:
    """Return what a rank sends per step by the formula."""
    return (2 if reshard is False else 3) * (num_ranks - 1) / num_ranks


if __name__ == "__main__":
    print_sent("reshard_after_forward", (None, False), model_sizes_sent_per_step, model_sizes_by_formula)
